// Which panels of a head can hold the most likely token: a bound of every logit from the high bits.
//
// A greedy step of few rows is bound by the bytes it reads, and of a head it wants an output a row.
// A head of Q8_0 lies in two planes (layout.h): five high bits of every code, 352 bytes a unit with
// scales, and three low ones, 192 bytes. BOUND reads the high plane, leaves an upper bound for each
// panel, and for each thread the highest lower bound that it has seen. BEST (head.h) then computes
// the product of those panels whose bound reaches the highest lower bound: of a model's own rows a
// few in ten thousand, so that a third of the head's bytes is not read. The values that BEST
// compares are the product's own, so that the token is the one it would be without bounds.
//
// Arithmetic. A code is u = 8 h + l with 0 ≤ l ≤ 7, and stands for u − 128. With the activations'
// codes x of a unit, X = Σ x and A = Σ |x|:
//
//   Σ (u − 128) x  =  c + e,   c = 8 Σ h x − 128 X + 3.5 X,   |e| = |Σ (l − 3.5) x| ≤ 3.5 A
//
// so with weight scale s (of either sign) and activation scale t a logit is within Σ |s| t 3.5 A of
// the centre Σ s t c. 2 c is an integer below 2^24 and is summed as one; beside the eight vpdpbusd
// a unit and row cost an addition, a conversion, a multiply and two fma. One row of panel_rows has
// two of them: under the memory's time up to `bounded` rows (records.h) at least.
//
// Rounding. u = 2^-24, n units, γ = (n + 2) u / (1 − (n + 2) u), R = Σ |s| t 3.5 A.
//   The product's logit v is a chain of n fma over terms of at most |s| t 128 A, each with one
//   rounding of s t:                       |v − exact| ≤ γ (128 / 3.5) R
//   The centre likewise, terms of at most |s| t 131.5 A:  |centre − exact| ≤ γ (131.5 / 3.5) R
//   The radius r, a chain of n fma, its terms with one rounding:      R ≤ r / (1 − γ)
//   So |v − centre| ≤ r (1 + 75 γ) / (1 − γ), and forming centre ± r · slack rounds once more, by
//   at most u (|centre| + r · slack) ≤ 41 u r. For n ≤ 2^17 all of it is below r · (n + 8) 77 u;
//   `slack` has 256 for 77. What underflows (flushed to zero or not) is at most 2^-105 a unit: r
//   starts from kLeastRadius, which is more for n ≤ 2^17.
//   Where r is above kMostRadius, or no number, nothing is claimed: the panel is a candidate, and
//   its logits are no lower bounds. Up to kMostRadius all sums of the product are finite.
//
// Where the model does not know what comes, most panels are candidates and the high plane was read
// for nothing: two thirds more of the head's bytes. What is spared meets what is read again where
// 6 of 17 panels are candidates. So a step with more than a quarter of them is followed by one
// without bounds, another such by two, and so on up to kLongestWait. Which way a step goes changes
// no token.
//
// A panel is left out only where all of its upper bounds are provably below a lower bound. A row
// with a NaN has r = NaN throughout: each panel is a candidate.
#pragma once
#include "products.h"

namespace {

constexpr float kLeastRadius = 1e-24f;
constexpr float kMostRadius = 1e36f;

constexpr int64_t kManyOf = 4;        // a quarter of the panels is too many
constexpr int64_t kLongestWait = 64;  // steps

struct Reach {  // of one row and unit
  float half;   // t / 2
  float reach;  // t · 3.5 A
  int32_t from; // −249 X: 2 c = 16 Σ h x + from
};

// Do BOUND and BEST go the two ways in this step?
HR_INLINE bool bounded(const HrHead& op, int64_t rows) {
  return rows > 0 && rows <= op.bounded && op.worth[0].skip == 0;
}

// After BEST, by one thread: a step with many candidates is followed by some without bounds.
HR_INLINE void weigh_up(const HrHead& op, const hr::Work& work) {
  HrWorth& worth = op.worth[0];
  if (worth.skip) {
    --worth.skip;
    ++worth.without;
    return;
  }
  int64_t computed = 0;
  for (int t = 0; t < work.threads; ++t) computed += op.worth[t].panels;
  ++worth.with;
  worth.left += computed;
  const bool many = computed * kManyOf > hr::panel_count(op.linear.parts[0].out);
  const int64_t longer = worth.wait == 0 ? 1 : 2 * worth.wait;
  worth.wait = !many ? 0 : longer < kLongestWait ? longer : kLongestWait;
  worth.skip = worth.wait;
}

inline int64_t bound_scratch(const HrHead& op) {
  return op.bounded * (op.linear.parts[0].in / HR_UNIT_K) * static_cast<int64_t>(sizeof(Reach));
}

// reaches[unit · rows + row]
inline void find_reaches(const HrQuantised& x, int rows, int units, Reach* reaches) {
  for (int u = 0; u < units; ++u)
    for (int r = 0; r < rows; ++r, ++reaches) {
      const HrLane& lane = x.six[u].lanes[r];
      int32_t all = 0;
      for (int i = 0; i < HR_UNIT_K; ++i) all += lane.codes[i] < 0 ? -lane.codes[i] : lane.codes[i];
      const float scale = lane.unit.scale;
      const int32_t from = lane.unit.all16 / 16 * 249;
      *reaches = {0.5f * scale, scale * (3.5f * static_cast<float>(all)), from};
    }
}

template <int M>
HR_INLINE void panel_bounds(const uint8_t* panel, int units, Rows x, const Reach* reaches,
                            F* centre, F* radius) {
  constexpr hr::Format f = Q8_0_PLANES::format;
  constexpr int lines = (f.block_bytes() + 63) / 64;
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    centre[m] = f_zero();
    radius[m] = f_set(kLeastRadius);
  }
  const bool near = hr::fetching.near;
  for (int u = 0; u < units; ++u, ++x.six, panel += f.block_bytes(), reaches += M) {
    const uint8_t* q = panel + f.header;
    if (M > 2 || hr::fetching.few) {
#pragma GCC unroll 6
      for (int i = 0; i < lines; ++i) ask(panel + kAhead + 64 * i, near);
    }
    I sum[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) sum[m] = i_zero();
#define HR_BODY(S)                                                                          \
  {                                                                                         \
    C w = Q8_0_PLANES::high<S>(q);                                                          \
    _Pragma("GCC unroll 4") for (int m = 0; m < M; ++m)                                     \
      sum[m] = dot_step<false, S>(sum[m], w, x.six->lanes[m].codes);                        \
  }
    HR_PAIRS8(HR_BODY);
#undef HR_BODY
    const F d = Q8_0_PLANES::scale(panel, q);
    const F size = f_bits(i_and(i_bits(d), i_set(0x7fffffff)));
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const F twice = f_from_i(i_add(i_shl<4>(sum[m]), i_spread(&reaches[m].from)));
      centre[m] = f_fma(twice, f_mul(d, f_set(reaches[m].half)), centre[m]);
      radius[m] = f_fma(size, f_set(reaches[m].reach), radius[m]);
    }
  }
}

// The upper bound of a panel with `left` outputs; `lower` may rise. −∞: it is below `lower` anyway.
HR_INLINE float bound_of(F centre, F radius, F slack, int left, float* lower) {
  const F above = f_fma(radius, slack, centre);
  const uint32_t known = f_not_below(f_set(kMostRadius), radius);
  uint32_t bits = f_not_below(above, f_set(*lower)) | ~known;
  bits &= left < HR_PANEL ? (1u << left) - 1 : 0xffffu;
  float bound = -__builtin_inff();
  if (__builtin_expect(bits == 0, 1)) return bound;
  float highest[HR_PANEL], least[HR_PANEL];
  f_store(highest, above);
  f_store(least, f_fnma(radius, slack, centre));
  for (; bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    if (!(known >> lane & 1)) {
      bound = __builtin_inff();
      continue;
    }
    if (highest[lane] > bound) bound = highest[lane];
    if (least[lane] > *lower) *lower = least[lane];
  }
  return bound;
}

template <int M>
__attribute__((noinline)) void panels_bounds(const HrHead& op, int64_t first, int64_t last,
                                             const Reach* reaches, float* lower) {
  const HrPart& part = op.linear.parts[0];
  const int units = part.in / HR_UNIT_K;
  const int64_t panels = hr::panel_count(part.out);
  const Rows x = rows_from(op.linear.x, 0);
  const F slack = f_set(1.0f + static_cast<float>(units + 8) / 65536.0f);
  for (int64_t panel = first; panel < last; ++panel) {
    F centre[M], radius[M];
    panel_bounds<M>(panel_of<Q8_0_PLANES>(part, panel).data, units, x, reaches, centre, radius);
    const int64_t left = part.out - panel * HR_PANEL;
    for (int m = 0; m < M; ++m)
      op.bounds[m * panels + panel] =
          bound_of(centre[m], radius[m], slack, left < HR_PANEL ? static_cast<int>(left) : HR_PANEL,
                   lower + m);
  }
}

static_assert(HR_BOUNDED == 4 && HR_BOUNDED <= HR_SIX, "a case for each, one block of rows");

void op_bound(const HrHead& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.linear.rows);
  if (!bounded(op, rows)) return;
  const int m = static_cast<int>(rows);
  auto* reaches = reinterpret_cast<Reach*>(work.scratch);
  find_reaches(op.linear.x, m, op.linear.parts[0].in / HR_UNIT_K, reaches);
  float* lower = op.lower + work.thread * op.stride;
  for (int r = 0; r < m; ++r) lower[r] = -__builtin_inff();
  each_run(op.linear, rows, work, [&](const HrPart&, int64_t first, int64_t last) {
    switch (m) {
#define HR_CASE(M) \
  case M: return panels_bounds<M>(op, first, last, reaches, lower);
      HR_CASE(1) HR_CASE(2) HR_CASE(3) HR_CASE(4)
#undef HR_CASE
    }
  });
}

// A rank that has not the most likely token would find candidates without end below its own best.
void op_lower(const HrHead& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.linear.rows);
  if (work.thread != 0 || rows > op.bounded) return;
  float* mine = op.lowest + op.rank * op.stride;
  const int threads = bounded(op, rows) ? work.threads : 0;
  for (int64_t r = 0; r < rows; ++r) {
    mine[r] = -__builtin_inff();
    for (int t = 0; t < threads; ++t)
      if (op.lower[t * op.stride + r] > mine[r]) mine[r] = op.lower[t * op.stride + r];
  }
}

// y of the panels that BOUND has left as candidates, for any of the rows.
void candidate_panels(const HrHead& op, const HrLinear& linear, const hr::Work& work) {
  const int64_t rows = work.rows(linear.rows), panels = hr::panel_count(linear.parts[0].out);
  float lower[HR_BOUNDED];
  for (int64_t r = 0; r < rows; ++r) {
    lower[r] = op.lower[r];
    for (int t = 1; t < work.threads; ++t)
      if (op.lower[t * op.stride + r] > lower[r]) lower[r] = op.lower[t * op.stride + r];
    for (int rank = 0; op.lowest && rank < op.ranks; ++rank)
      if (op.lowest[rank * op.stride + r] > lower[r]) lower[r] = op.lowest[rank * op.stride + r];
  }
  const auto candidate = [&](int64_t panel) {
    for (int64_t r = 0; r < rows; ++r)
      if (!(op.bounds[r * panels + panel] < lower[r])) return true;
    return false;
  };
  int64_t computed = 0;
  each_run(linear, rows, work, [&](const HrPart& part, int64_t first, int64_t last) {
    while (first < last) {
      int64_t end = first;
      while (end < last && candidate(end)) ++end;
      if (end > first) part_panels(linear, part, rows, first, end);
      computed += end - first;
      first = end + 1;
    }
  });
  op.worth[work.thread].panels = computed;
}

}  // namespace

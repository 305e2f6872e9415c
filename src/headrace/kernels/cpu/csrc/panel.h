// Rows by panels: the one kernel of quantised products, from one row to thousands.
//
// The arithmetic. Per unit (16 outputs × 32 of K) and row: 8 vpdpbusd, one int → float, one
// multiply (weight scale × activation scale), one fma. On a core that retires one 512-bit
// vpdpbusd a cycle and shares its two ports with the float multiplies (Zen 4) that is 10 cycles
// for 1,024 operations: no kernel with groups of 32 passes 80 % of the integer peak. With
// minima (Q4_K) or two groups a unit (Q6_K) it is 11 cycles and 73 %. Conversions, shifts and
// the decoding of codes go to the other two ports and are free from about six rows on: up to kWide
// rows stay in registers over one panel. More rows pass over it again while it lies in L2. Where a
// level multiplies bytes in one operation, four to eight rows take two panels (panel_twins.h), and
// more than kWide, on Zen 5 more than 24, meet decoded ones (panel_pairs.h).
//
// Memory. A unit is 288 to 544 bytes. One row spends about 20 cycles on it, 15 to 25 bytes a
// cycle and core, several times what memory gives; eight rows spend 80 and still want 4 to 7, so
// that they are bound by both and only as fast as the two overlap. The hardware's prefetcher
// alone serves a stream that is read at full speed, but for Intel's and Zen 5's (levels.h), where one
// row reads a third less a second than by asking. When arithmetic stands between the loads, the
// out-of-order window holds no more than two units, and lines are asked for kAhead bytes early;
// a pass that finds its panels in L2 asks for the next group's.
//
// Both give, per output and row, acc ← fma(float(Σ codes), scale_w · scale_x, acc), unit by unit
// in order of K, so a row's bits do not depend on how many rows came with it.
#pragma once
#include "levels.h"
#include "units.h"
#include "work.h"

namespace {

#if HR_LEVEL >= 3
constexpr int kWide = 12;  // rows in registers: a float and an integer vector each, of 32
#else
constexpr int kWide = 6;   // sixteen half as wide: the float sums are spilled, once a unit
#endif
constexpr int kFew = 3;        // rows of which decoding is a good part of the work
constexpr int kGroup = 8;      // panels of a group, at most: what later passes find in L2
constexpr int kSums = kGroup * HR_PANEL;  // floats from the sums of a row to those of the next
constexpr int kManyRows = 96;  // by decoded panels: the most whose sums are kept at once (panel_pairs.h)
constexpr int kAhead = 8192;   // bytes
static_assert(sizeof(HrLane) == 64, "a lane is a cache line: with one or two rows lines count");
static_assert(kWide % HR_SIX == 0, "a pass begins at the first lane of a block of six");

// The rows of one pass: the first of them is lane 0 of `six`.
struct Rows {
  const HrSix* six;
  int64_t stride;  // HrSix between blocks of six rows
};

HR_INLINE Rows rows_from(const HrQuantised& x, int64_t row) {
  return {x.six + row / HR_SIX * x.stride, x.stride};
}

// How many of the `left` rows the next pass takes: multiples of six but for the last, and none
// so few that decoding would show.
HR_INLINE int rows_of_pass(int64_t left) {
  if (left <= kWide) return static_cast<int>(left);
  return left < kWide + HR_SIX && kWide > HR_SIX ? kWide - HR_SIX : kWide;
}

HR_INLINE int passes_of(int64_t rows) {
  int passes = 0;
  for (; rows > 0; rows -= rows_of_pass(rows)) ++passes;
  return passes;
}

// What an accumulator starts from, so that codes stand for code − zero.
template <class Q>
HR_INLINE I start_from(const HrUnit& x) {
  static_assert(Q::zero == 8 || Q::zero == 16 || Q::zero == 128);
  if constexpr (Q::eight && kSigned8) return i_zero();
  if constexpr (Q::zero == 8) return i_shr<1>(i_spread(&x.all16));
  return i_spread(Q::zero == 16 ? &x.all16 : &x.all128);
}

// The same for sixteen, from −32 · Σx.
template <class Q>
HR_INLINE I half_from(const int32_t* sum) {
  static_assert(Q::zero == 32 || Q::zero == 16);
  return Q::zero == 32 ? i_spread(sum) : i_shr<1>(i_spread(sum));
}

enum Fetch {
  kHardware,  // nothing is asked for early
  kOwn,       // this panel's bytes and those after it, kAhead early
  kNext       // lines of the next group of panels, shared among passes
};

// The next group: every `step`th line of each unit, beginning with `line`.
struct Ahead {
  int64_t distance, low;  // bytes from this group to the next, in each plane
  int line, step;
};

struct Panel {
  const uint8_t* data;
  const uint8_t* low;  // its plane of low bits, where its kind has one
};

HR_INLINE void ask(const void* line, bool near) {
  if (near) prefetch_l1(line);
  else prefetch_l2(line);
}

// M rows by one panel. Loads of activations are broadcasts of four bytes.
template <class Q, int M, Fetch kFetch>
HR_INLINE void panel_rows(Panel panel, int blocks, Rows x, Ahead ahead, F* acc) {
  constexpr hr::Format f = Q::format;
  constexpr int lines = (f.block_bytes() / f.units() + 63) / 64, low_lines = f.low_bytes / 64;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) acc[m] = f_zero();
  const uint8_t *block = panel.data, *low = panel.low;
  [[maybe_unused]] const bool near = hr::fetching.near;
  for (int b = 0; b < blocks; ++b, block += f.block_bytes()) {
    for (int u = 0; u < f.units(); ++u, ++x.six, low += f.low_bytes) {
      const uint8_t* unit = block + f.header + u * f.unit_bytes();
      const uint8_t* q = unit + f.unit_extra;
      if constexpr (kFetch == kOwn) {
#pragma GCC unroll 9
        for (int i = 0; i < lines; ++i) ask(unit + kAhead + 64 * i, near);
#pragma GCC unroll 3
        for (int i = 0; i < low_lines; ++i) ask(low + kAhead + 64 * i, near);
      }
      if constexpr (kFetch == kNext) {
        for (int i = ahead.line; i < lines; i += ahead.step)
          prefetch_l2(unit + ahead.distance + 64 * i);
        for (int i = ahead.line; i < low_lines; i += ahead.step)
          prefetch_l2(low + ahead.low + 64 * i);
      }
#define HR_UNIT(m) x.six[(m) / HR_SIX * x.stride].lanes[(m) % HR_SIX].unit
#define HR_CODES(m) x.six[(m) / HR_SIX * x.stride].lanes[(m) % HR_SIX].codes
      I sum[M];
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        if constexpr (Q::mode == kPlain) sum[m] = start_from<Q>(HR_UNIT(m));
        if constexpr (Q::mode == kSub) sum[m] = half_from<Q>(&HR_UNIT(m).low32);
        if constexpr (Q::mode == kMin) sum[m] = i_zero();
      }
#define HR_BODY(S)                                           \
  {                                                          \
    C w = code_of<Q, S, (M <= kFew)>(q, low);                \
    _Pragma("GCC unroll 12") for (int m = 0; m < M; ++m)     \
      sum[m] = dot_step<Q::eight, S>(sum[m], w, HR_CODES(m));  \
  }
      if constexpr (Q::mode == kSub) {
        // (d0 · Σ0 + d1 · Σ1) · scale_x: both halves share the activations' scale.
        F d = Q::scale(block, unit), half[M];
        constexpr bool away = M > 8;  // halves in memory, or there are too few registers
        alignas(64) float halves[away ? M : 1][HR_PANEL];
        F d0 = f_mul(d, Q::sixteenth(unit)), d1 = f_mul(d, Q::sixteenth(unit + 16));
        HR_BODY(0) HR_BODY(1) HR_BODY(2) HR_BODY(3)
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          half[m] = f_mul(d0, f_from_i(sum[m]));
          if constexpr (away) f_put_away(halves[m], half[m]);
          sum[m] = half_from<Q>(&HR_UNIT(m).high32);
        }
        HR_BODY(4) HR_BODY(5) HR_BODY(6) HR_BODY(7)
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          if constexpr (away) half[m] = f_load(halves[m]);
          acc[m] = f_fma(f_fma(d1, f_from_i(sum[m]), half[m]), f_set(HR_UNIT(m).scale), acc[m]);
        }
      } else {
        if constexpr (f.low_bytes != 0) HR_PAIRS8(HR_BODY);
        else HR_STEPS8(HR_BODY);
        F d = Q::scale(block, unit);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m)
          acc[m] = f_fma(f_from_i(sum[m]), f_mul(d, f_set(HR_UNIT(m).scale)), acc[m]);
        if constexpr (Q::mode == kMin) {
          F low = Q::min(block, unit);
#pragma GCC unroll 12
          for (int m = 0; m < M; ++m) acc[m] = f_fma(low, f_set(HR_UNIT(m).sum), acc[m]);
        }
      }
#undef HR_BODY
#undef HR_UNIT
#undef HR_CODES
    }
  }
}

template <class Q>
HR_INLINE Panel panel_of(const HrPart& part, int64_t panel) {
  constexpr hr::Format f = Q::format;
  const int64_t blocks = part.in / f.span;
  const uint8_t* low = part.data;
  if (f.low_bytes)
    low = part.low ? part.low + panel * blocks * f.units() * f.low_bytes
                   : part.data + hr::low_at(f, part.out, part.in, panel);
  return {part.data + panel * blocks * f.block_bytes(), low};
}

}  // namespace

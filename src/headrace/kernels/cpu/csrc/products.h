// y = x · wᵀ from panels: the matrix-vector and the matrix kernel.
//
// The arithmetic. Per unit (16 outputs × 32 of K) and row: 8 vpdpbusd, one int → float, one
// multiply (weight scale × activation scale), one fma. On a core that retires one 512-bit
// vpdpbusd per cycle (Zen 4; Ice Lake's two 256-bit halves fused) and shares that port with the
// float multiplies, 10 cycles for 1,024 operations: the matrix kernel cannot pass 80 % of the
// integer peak with groups of 32, 67 % for Q6_K (two more integer multiplies).
// One row reads 288 to 544 bytes a unit and spends about 20 cycles on it (decoding 8 vectors,
// 8 vpdpbusd, 3 float operations): 15 to 25 bytes a cycle and core, several times what memory
// gives, so up to about eight rows cost what one costs.
//
// Matrix-vector (up to kVectorRows rows, kRows at a time): codes are decoded in registers on the way, each panel read
// once, front to back; a thread's panels lie one after the other, so its stream is one and the
// hardware's prefetcher keeps it at the limit (prefetch instructions cost 10 to 20 % here). Matrix: two panels × a chunk of K are decoded into scratch that stays in
// L1 (kChunk units: 16 KiB of codes), then every row passes over it, kRows at a time; partial
// float sums wait in scratch between chunks. Both compute, per output and row,
//   acc ← fma(float(Σ codes), scale_w · scale_x, acc), unit by unit in order of K,
// so a row's bits do not depend on how many rows came with it.
#pragma once
#include "units.h"
#include "work.h"

namespace {

#if HR_LEVEL >= 3
constexpr int kRows = 6;    // rows in registers
constexpr int kPanels = 2;  // panels in registers, matrix kernel
#else
constexpr int kRows = 3;
constexpr int kPanels = 1;
#endif
constexpr int kVectorRows = 36;  // up to here panels are decoded anew for every kRows rows
constexpr int kChunk = 16;      // units of K per pass of the matrix kernel
constexpr int kSlab = 504;      // rows per pass: partial sums stay in L2

// The rows of one call: `lane` is the first of them in every HrSix from `six` on.
struct Rows {
  const HrSix* six;
  int lane;
};

HR_INLINE int32_t dword(const int8_t* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return x;
}

// What an accumulator starts from, so that codes stand for code − zero.
template <bool kEight, int kZero>
HR_INLINE I start_from(int32_t negative_sum) {
  if constexpr (kEight && kSigned8) return i_zero();
  return i_shl<kZero>(i_set(negative_sum));
}

template <bool kEight>
HR_INLINE I dot(I acc, C w, int32_t a4) {
  if constexpr (kEight) return dot8(acc, w, a4);
  return dot7(acc, w, a4);
}

// ---- matrix-vector: M rows by one panel, straight from the packed form

// What a pass over a panel fetches meanwhile: every `step`th line of each unit of the next panel,
// beginning with `line` (kFetch; the first pass leaves memory to the hardware's prefetcher).
struct Ahead {
  const uint8_t* panel;
  int line, step;
};

template <class Q, int M, bool kFetch>
HR_INLINE void vector_panel(const uint8_t* panel, int blocks, Rows x, Ahead ahead, F* acc) {
  constexpr hr::Format f = Q::format;
  for (int m = 0; m < M; ++m) acc[m] = f_zero();
  const uint8_t* block = panel;
  for (int b = 0; b < blocks; ++b, block += f.block_bytes()) {
    for (int u = 0; u < f.units(); ++u) {
      const uint8_t* unit = block + f.header + u * f.unit_bytes();
      const uint8_t* q = unit + f.unit_extra;
      if constexpr (kFetch)
        for (int i = ahead.line; i < (f.unit_bytes() + 63) / 64; i += ahead.step)
          _mm_prefetch(reinterpret_cast<const char*>(ahead.panel + (unit - panel) + 64 * i),
                       _MM_HINT_T1);
      I sum[M], high[M];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const HrUnit& a = x.six->units[x.lane + m];
        if constexpr (Q::mode == kMin) {
          sum[m] = i_zero();
        } else if constexpr (Q::mode == kSub) {
          sum[m] = start_from<Q::eight, Q::zero>(a.low);
          high[m] = start_from<Q::eight, Q::zero>(a.all - a.low);
        } else {
          sum[m] = start_from<Q::eight, Q::zero>(a.all);
        }
      }
#define HR_BODY(S)                                                     \
  {                                                                    \
    C w = Q::template code<S>(q);                                      \
    for (int m = 0; m < M; ++m) {                                      \
      int32_t a4 = dword(x.six->codes[x.lane + m] + 4 * (S));          \
      I& to = Q::mode == kSub && S >= 4 ? high[m] : sum[m];            \
      to = dot<Q::eight>(to, w, a4);                                   \
    }                                                                  \
  }
      HR_STEPS8(HR_BODY);
#undef HR_BODY
      if constexpr (Q::mode == kSub) {
        F d = Q::scale(block, unit);
        I s0 = i_s8(reinterpret_cast<const int8_t*>(unit));
        I s1 = i_s8(reinterpret_cast<const int8_t*>(unit + 16));
        for (int m = 0; m < M; ++m) {
          I total = i_add(i_mul(sum[m], s0), i_mul(high[m], s1));
          F ws = f_mul(d, f_set(x.six->units[x.lane + m].scale));
          acc[m] = f_fma(f_from_i(total), ws, acc[m]);
        }
      } else {
        F d = Q::scale(block, unit);
        for (int m = 0; m < M; ++m) {
          F ws = f_mul(d, f_set(x.six->units[x.lane + m].scale));
          acc[m] = f_fma(f_from_i(sum[m]), ws, acc[m]);
        }
        if constexpr (Q::mode == kMin) {
          F low = Q::min(block, unit);
          for (int m = 0; m < M; ++m)
            acc[m] = f_fma(low, f_set(x.six->units[x.lane + m].sum), acc[m]);
        }
      }
      x.six += 1;
    }
  }
}

// ---- the end of a product: bias, sum with what is there, the last panel's missing outputs

struct Target {
  float* y;
  const float* bias;
  int left;  // outputs of this panel that exist, 1 … 16
  bool accumulate;
};

HR_INLINE void finish(const Target& t, F acc) {
  if (t.left >= HR_PANEL) {
    if (t.bias) acc = f_add(acc, f_load(t.bias));
    if (t.accumulate) acc = f_add(f_load(t.y), acc);
    f_store(t.y, acc);
    return;
  }
  float values[HR_PANEL];
  f_store(values, acc);
  for (int o = 0; o < t.left; ++o) {
    float value = values[o];
    if (t.bias) value += t.bias[o];
    if (t.accumulate) value = t.y[o] + value;
    t.y[o] = value;
  }
}

HR_INLINE Target target_of(const HrPart& part, int64_t row, int64_t panel) {
  const int64_t first = panel * HR_PANEL;
  const int64_t left = part.out - first;
  return {part.y + row * part.y_stride + first, part.bias ? part.bias + first : nullptr,
          static_cast<int>(left < HR_PANEL ? left : HR_PANEL), part.accumulate != 0};
}

HR_INLINE Rows rows_from(const HrQuantised& x, int64_t row) {
  return {x.six + row / HR_SIX * x.stride, static_cast<int>(row % HR_SIX)};
}

// M rows by `panels` panels; sums[m · stride + 16 p + lane].
template <class Q, int M, bool kFetch>
__attribute__((noinline)) void vector_store(const uint8_t* data, int panels, int blocks, Rows x,
                                            Ahead ahead, float* sums, int64_t stride) {
  const int64_t bytes = static_cast<int64_t>(blocks) * Q::format.block_bytes();
  for (int p = 0; p < panels; ++p, data += bytes, ahead.panel += bytes) {
    F acc[M];
    vector_panel<Q, M, kFetch>(data, blocks, x, ahead, acc);
    for (int m = 0; m < M; ++m) f_store(sums + m * stride + 16 * p, acc[m]);
  }
}

template <class Q, bool kFetch>
HR_INLINE void vector_pass(int m, const uint8_t* data, int panels, int blocks, Rows x,
                           Ahead ahead, float* sums, int64_t stride) {
  switch (m) {
    case 1: return vector_store<Q, 1, kFetch>(data, panels, blocks, x, ahead, sums, stride);
    case 2: return vector_store<Q, 2, kFetch>(data, panels, blocks, x, ahead, sums, stride);
    case 3: return vector_store<Q, 3, kFetch>(data, panels, blocks, x, ahead, sums, stride);
#if HR_LEVEL >= 3
    case 4: return vector_store<Q, 4, kFetch>(data, panels, blocks, x, ahead, sums, stride);
    case 5: return vector_store<Q, 5, kFetch>(data, panels, blocks, x, ahead, sums, stride);
    case 6: return vector_store<Q, 6, kFetch>(data, panels, blocks, x, ahead, sums, stride);
#endif
  }
}

// Up to kRows rows by panels [first, last): one loop, so that nothing stands between a panel and
// the next (a call and a store per panel cost a third at 28 units a panel).
template <class Q, int M>
void vector_panels(const HrLinear& op, const HrPart& part, int64_t first, int64_t last) {
  const int blocks = part.in / Q::format.span;
  const int64_t bytes = static_cast<int64_t>(blocks) * Q::format.block_bytes();
  const Rows x = rows_from(op.x, 0);
  const uint8_t* data = part.data + first * bytes;
  for (int64_t panel = first; panel < last; ++panel, data += bytes) {
    F acc[M];
    vector_panel<Q, M, false>(data, blocks, x, Ahead{}, acc);
    for (int m = 0; m < M; ++m) finish(target_of(part, m, panel), acc[m]);
  }
}

template <class Q>
void vector_few(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                int64_t last) {
  switch (rows) {
    case 1: return vector_panels<Q, 1>(op, part, first, last);
    case 2: return vector_panels<Q, 2>(op, part, first, last);
    case 3: return vector_panels<Q, 3>(op, part, first, last);
#if HR_LEVEL >= 3
    case 4: return vector_panels<Q, 4>(op, part, first, last);
    case 5: return vector_panels<Q, 5>(op, part, first, last);
    case 6: return vector_panels<Q, 6>(op, part, first, last);
#endif
  }
}

// Two panels side by side into sums[32 · row + 16 · p + lane], up to kRows rows.
template <class Q, int M>
void vector_pair(const HrQuantised& activations, const HrPart& part, int64_t panel, float* sums) {
  const int blocks = part.in / Q::format.span;
  const int64_t bytes = static_cast<int64_t>(blocks) * Q::format.block_bytes();
  const Rows x = rows_from(activations, 0);
  for (int p = 0; p < 2; ++p) {
    F acc[M];
    vector_panel<Q, M, false>(part.data + (panel + p) * bytes, blocks, x, Ahead{}, acc);
    for (int m = 0; m < M; ++m) f_store(sums + 32 * m + 16 * p, acc[m]);
  }
}

// sums[row · stride + 16 p + lane] of `panels` panels, kRows rows at a time. The first pass
// streams them from memory; the others find them in L2 and fetch as many of the next, so that
// memory and arithmetic overlap.
template <class Q>
void vector_sums(const HrQuantised& activations, const HrPart& part, int64_t panel, int panels,
                 int64_t rows, float* sums, int64_t stride) {
  const int blocks = part.in / Q::format.span;
  const int64_t bytes = static_cast<int64_t>(blocks) * Q::format.block_bytes();
  const uint8_t* data = part.data + panel * bytes;
  const int passes = static_cast<int>((rows + kRows - 1) / kRows);
  for (int pass = 0; pass < passes; ++pass, sums += kRows * stride) {
    const int64_t row = pass * kRows;
    const int m = static_cast<int>(rows - row < kRows ? rows - row : kRows);
    const Rows x = rows_from(activations, row);
    const Ahead ahead{data + panels * bytes, pass - 1, passes - 1};
    if (pass == 0)
      vector_pass<Q, false>(m, data, panels, blocks, x, ahead, sums, stride);
    else
      vector_pass<Q, true>(m, data, panels, blocks, x, ahead, sums, stride);
  }
}

// ---- matrix: decode once, pass all rows over it

struct Decoded {  // one panel × kChunk units
  uint8_t codes[kChunk * 8 * 64];
  float scale[kChunk * 16];
  float min[kChunk * 16];       // kMin
  int32_t sub[kChunk * 2 * 16]; // kSub
};

template <class Q>
void decode(const uint8_t* panel, int unit0, int count, Decoded* to) {
  constexpr hr::Format f = Q::format;
  for (int i = 0; i < count; ++i) {
    const uint8_t* block = panel + (unit0 + i) / f.units() * f.block_bytes();
    const uint8_t* unit = block + f.header + (unit0 + i) % f.units() * f.unit_bytes();
    const uint8_t* q = unit + f.unit_extra;
    uint8_t* out = to->codes + i * 512;
#define HR_BODY(S) c_store(out + 64 * S, Q::template code<S>(q));
    HR_STEPS8(HR_BODY);
#undef HR_BODY
    f_store(to->scale + 16 * i, Q::scale(block, unit));
    if constexpr (Q::mode == kMin) f_store(to->min + 16 * i, Q::min(block, unit));
    if constexpr (Q::mode == kSub) {
      i_store(to->sub + 32 * i, i_s8(reinterpret_cast<const int8_t*>(unit)));
      i_store(to->sub + 32 * i + 16, i_s8(reinterpret_cast<const int8_t*>(unit + 16)));
    }
  }
}

// M rows × P panels over `count` units; sums[m · 32 + 16 p] holds what earlier chunks gave.
// `ahead` is what the next call will read of the activations: it is fetched meanwhile.
template <class Q, int M, int P>
__attribute__((noinline)) void block(const Decoded* w, int count, Rows x, const HrSix* ahead,
                                     bool first, float* sums) {
  F acc[M][P];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p)
      acc[m][p] = first ? f_zero() : f_load(sums + m * 16 * kPanels + 16 * p);
  for (int i = 0; i < count; ++i) {
    I sum[M][P];
    const HrUnit* a = x.six[i].units + x.lane;
#pragma GCC unroll 5
    for (int line = 0; line < 5; ++line)
      _mm_prefetch(reinterpret_cast<const char*>(ahead + i) + 64 * line, _MM_HINT_T0);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      I start = i_zero();
      if constexpr (Q::mode == kPlain) start = start_from<Q::eight, Q::zero>(a[m].all);
      if constexpr (Q::mode == kSub) start = start_from<Q::eight, Q::zero>(a[m].low);
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) sum[m][p] = start;
    }
    const int8_t(*codes)[32] = x.six[i].codes + x.lane;
#define HR_BODY(S)                                                        \
  {                                                                       \
    C c[P];                                                               \
    for (int p = 0; p < P; ++p) c[p] = c_load(w[p].codes + i * 512 + 64 * (S)); \
    _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m) {                 \
      int32_t a4 = dword(codes[m] + 4 * (S));                             \
      _Pragma("GCC unroll 2") for (int p = 0; p < P; ++p)                 \
        sum[m][p] = dot<Q::eight>(sum[m][p], c[p], a4);                   \
    }                                                                     \
  }
    if constexpr (Q::mode == kSub) {
      // The first half is scaled before the second is summed: one set of registers for both.
      I half[M][P];
      HR_BODY(0) HR_BODY(1) HR_BODY(2) HR_BODY(3)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        I start = start_from<Q::eight, Q::zero>(a[m].all - a[m].low);
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
          half[m][p] = i_mul(sum[m][p], i_load(w[p].sub + 32 * i));
          sum[m][p] = start;
        }
      }
      HR_BODY(4) HR_BODY(5) HR_BODY(6) HR_BODY(7)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p)
          sum[m][p] = i_add(half[m][p], i_mul(sum[m][p], i_load(w[p].sub + 32 * i + 16)));
    } else {
      HR_STEPS8(HR_BODY);
    }
#undef HR_BODY
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      F d = f_load(w[p].scale + 16 * i);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
        acc[m][p] = f_fma(f_from_i(sum[m][p]), f_mul(d, f_set(a[m].scale)), acc[m][p]);
      if constexpr (Q::mode == kMin) {
        F low = f_load(w[p].min + 16 * i);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) acc[m][p] = f_fma(low, f_set(a[m].sum), acc[m][p]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) f_store(sums + m * 16 * kPanels + 16 * p, acc[m][p]);
}

template <class Q, int P>
HR_INLINE void block_dispatch(int rows, const Decoded* w, int count, Rows x, const HrSix* ahead,
                              bool first, float* sums) {
  switch (rows) {
    case 1: return block<Q, 1, P>(w, count, x, ahead, first, sums);
    case 2: return block<Q, 2, P>(w, count, x, ahead, first, sums);
    case 3: return block<Q, 3, P>(w, count, x, ahead, first, sums);
#if HR_LEVEL >= 3
    case 4: return block<Q, 4, P>(w, count, x, ahead, first, sums);
    case 5: return block<Q, 5, P>(w, count, x, ahead, first, sums);
    case 6: return block<Q, 6, P>(w, count, x, ahead, first, sums);
#endif
  }
}

// Sums of rows [row0, end) by panels [panel, panel + P): sums[(row − row0) · 16 kPanels + 16 p].
template <class Q, int P>
void matrix_sums(const HrQuantised& activations, const HrPart& part, int64_t row0, int64_t end,
                 int64_t panel, Decoded* decoded, float* sums) {
  const int64_t bytes = hr::panel_bytes(part.kind, part.in);
  const int units = part.in / HR_UNIT_K;
  const uint8_t* data = part.data + panel * bytes;
  const int64_t passes = (end - row0 + kRows - 1) / kRows;
  const int64_t per_unit = bytes / units;
  for (int unit = 0; unit < units; unit += kChunk) {
    const int count = units - unit < kChunk ? units - unit : kChunk;
    for (int p = 0; p < P; ++p) decode<Q>(data + p * bytes, unit, count, decoded + p);
    // While the rows pass, the next chunk of the weights comes into L2.
    const uint8_t* next = data + (unit + count) * per_unit;
    const int64_t want = (count * per_unit + 63) / 64;
    const int64_t each = (want + passes - 1) / passes;
    for (int64_t row = row0, pass = 0; row < end; row += kRows, ++pass) {
      for (int64_t line = pass * each; line < (pass + 1) * each && line < want; ++line)
        for (int p = 0; p < P; ++p)
          _mm_prefetch(reinterpret_cast<const char*>(next + p * bytes + 64 * line), _MM_HINT_T1);
      Rows x = rows_from(activations, row);
      x.six += unit;
      const HrSix* ahead = row + kRows < end ? rows_from(activations, row + kRows).six + unit
                                             : rows_from(activations, row0).six + unit + count;
      const int m = static_cast<int>(end - row < kRows ? end - row : kRows);
      block_dispatch<Q, P>(m, decoded, count, x, ahead, unit == 0,
                           sums + (row - row0) * 16 * kPanels);
    }
  }
}

constexpr int64_t kSums = kSlab * 16 * kPanels;  // floats
constexpr int64_t kProductScratch =
    static_cast<int64_t>(sizeof(Decoded)) * kPanels + 2 * (kSums + 32 * kSlab) * 4;

HR_INLINE int64_t slab_of(int64_t rows) {
  const int64_t slabs = (rows + kSlab - 1) / kSlab;
  return ((rows + slabs - 1) / slabs + HR_SIX - 1) / HR_SIX * HR_SIX;
}

template <class Q, int P>
void matrix_panels(const HrLinear& op, const HrPart& part, int64_t rows, int64_t panel,
                   uint8_t* scratch) {
  auto* decoded = reinterpret_cast<Decoded*>(scratch);
  auto* sums = reinterpret_cast<float*>(scratch + sizeof(Decoded) * kPanels);
  const int64_t slab = slab_of(rows);
  for (int64_t row0 = 0; row0 < rows; row0 += slab) {
    const int64_t end = row0 + slab < rows ? row0 + slab : rows;
    matrix_sums<Q, P>(op.x, part, row0, end, panel, decoded, sums);
    for (int64_t row = row0; row < end; ++row)
      for (int p = 0; p < P; ++p)
        finish(target_of(part, row, panel + p),
               f_load(sums + (row - row0) * 16 * kPanels + 16 * p));
  }
}

// ---- dense panels [k][16] in fp32, fp16 or bf16, activations in fp32: a plain fma chain over K

template <int K>
HR_INLINE F dense_load(const uint8_t* p, int64_t k) {
  if constexpr (K == HR_F32) return f_load(reinterpret_cast<const float*>(p) + 16 * k);
  const auto* q = reinterpret_cast<const uint16_t*>(p) + 16 * k;
  if constexpr (K == HR_F16) return f_half(q);
  return f_bf16(q);
}

template <int K, int M>
void dense_rows(const HrLinear& op, const HrPart& part, int64_t row, int64_t panel) {
  const uint8_t* w = part.data + panel * hr::panel_bytes(K, part.in);
  const float* x = op.dense + row * op.dense_stride;
  F acc[M];
  for (int m = 0; m < M; ++m) acc[m] = f_zero();
  for (int64_t k = 0; k < part.in; ++k) {
    F v = dense_load<K>(w, k);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[m] = f_fma(f_set(x[m * op.dense_stride + k]), v, acc[m]);
  }
  for (int m = 0; m < M; ++m) finish(target_of(part, row + m, panel), acc[m]);
}

template <int K>
void dense_panel(const HrLinear& op, const HrPart& part, int64_t rows, int64_t panel) {
  int64_t row = 0;
  for (; row + 8 <= rows; row += 8) dense_rows<K, 8>(op, part, row, panel);
  for (; row + 4 <= rows; row += 4) dense_rows<K, 4>(op, part, row, panel);
  for (; row < rows; ++row) dense_rows<K, 1>(op, part, row, panel);
}

// ---- sharing among threads: runs of panels, handed out as threads come for them

template <class Q>
void quantised_part(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                    int64_t last, uint8_t* scratch) {
  if (rows <= kRows) return vector_few<Q>(op, part, rows, first, last);
  if (rows <= kVectorRows) {
    constexpr int kMost = 8;
    float sums[kVectorRows * HR_PANEL * kMost];
    for (int64_t panel = first; panel < last; panel += kMost) {
      const int count = static_cast<int>(last - panel < kMost ? last - panel : kMost);
      vector_sums<Q>(op.x, part, panel, count, rows, sums, HR_PANEL * kMost);
      for (int64_t row = 0; row < rows; ++row)
        for (int p = 0; p < count; ++p)
          finish(target_of(part, row, panel + p), f_load(sums + (row * kMost + p) * HR_PANEL));
    }
    return;
  }
  int64_t panel = first;
  for (; panel + kPanels <= last; panel += kPanels)
    matrix_panels<Q, kPanels>(op, part, rows, panel, scratch);
  for (; panel < last; ++panel) matrix_panels<Q, 1>(op, part, rows, panel, scratch);
}

void part_panels(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                 int64_t last, uint8_t* scratch) {
  switch (part.kind) {
    case HR_Q4_0: return quantised_part<Q4_0>(op, part, rows, first, last, scratch);
    case HR_Q4_1: return quantised_part<Q4_1>(op, part, rows, first, last, scratch);
    case HR_Q5_0: return quantised_part<Q5_0>(op, part, rows, first, last, scratch);
    case HR_Q5_1: return quantised_part<Q5_1>(op, part, rows, first, last, scratch);
    case HR_Q8_0: return quantised_part<Q8_0>(op, part, rows, first, last, scratch);
    case HR_Q4_K: return quantised_part<Q4_K>(op, part, rows, first, last, scratch);
    case HR_Q5_K: return quantised_part<Q5_K>(op, part, rows, first, last, scratch);
    case HR_Q6_K: return quantised_part<Q6_K>(op, part, rows, first, last, scratch);
    case HR_F32:
      for (; first < last; ++first) dense_panel<HR_F32>(op, part, rows, first);
      return;
    case HR_F16:
      for (; first < last; ++first) dense_panel<HR_F16>(op, part, rows, first);
      return;
    case HR_BF16:
      for (; first < last; ++first) dense_panel<HR_BF16>(op, part, rows, first);
      return;
  }
}

// Items are runs of panels of about kRun bytes (one to few rows: the stream stays long) or of
// kPanels panels (many rows: the shares stay even), numbered through all parts of the product.
constexpr int64_t kRun = 48 * 1024;

HR_INLINE int64_t run_of(const HrPart& part, int64_t rows, int threads) {
  if (rows > kVectorRows) return kPanels;
  const int64_t fair = hr::panel_count(part.out) / (4 * threads);
  int64_t run = kRun / hr::panel_bytes(part.kind, part.in);
  if (run > fair) run = fair;
  return run < 1 ? 1 : run;
}

void op_linear(const HrLinear& op, const hr::Work& work) {
  const int64_t rows = op.rows == HR_ROWS_N ? work.step->n : work.step->r;
  if (rows == 0) return;
  int64_t total = 0;
  for (int32_t i = 0; i < op.count; ++i) {
    const int64_t run = run_of(op.parts[i], rows, work.threads);
    total += (hr::panel_count(op.parts[i].out) + run - 1) / run;
  }
  int victim = 0;
  int64_t item;
  while (work.next_in_line(total, &victim, &item)) {
    for (int32_t i = 0; i < op.count; ++i) {
      const HrPart& part = op.parts[i];
      const int64_t panels = hr::panel_count(part.out), run = run_of(part, rows, work.threads);
      const int64_t items = (panels + run - 1) / run;
      if (item >= items) {
        item -= items;
        continue;
      }
      const int64_t first = item * run, last = first + run < panels ? first + run : panels;
      part_panels(op, part, rows, first, last, work.scratch);
      break;
    }
  }
}

}  // namespace

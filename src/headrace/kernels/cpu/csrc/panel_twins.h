// Four to eight rows by two panels at once.
//
// The arithmetic of panel.h, its sums and their order, so the same bits. There each product of a
// row loads its own four bytes of activations, and on Ice Lake (model 106) loads are what binds:
// 0.26 ns each, 3.2 ns a unit and row, with whatever decoding. Here a load serves two panels, whose
// codes are decoded into registers. The integer sums of eight rows take sixteen registers, so that
// float sums lie in L1. By hand, from L2, a unit and row takes 0.79 (six rows) to 0.87 (eight) of
// the time (Q5_0, Q8_0, Q4_0), 0.83 to 0.92 (Q4_K). Two scales a unit (Q6_K) have halves in L1 too:
// nothing is gained. Nor with more rows, whose sums do not fit.
#pragma once
#include "panel.h"

#if HR_LEVEL >= 4  // others have no product of bytes that adds to its sum

namespace {

constexpr bool kTernary = HR_LEVEL == 4;  // Zen 4 multiplies on the ports of ternary operations

template <class Q, int M>
constexpr bool kByTwo = kFew < M && M <= 8 && Q::mode != kSub;

// Step S of a row by two panels.
template <int S>
HR_INLINE void twin_step(I& a, I& b, C w0, C w1, const int8_t* codes) {
  __asm__("vpbroadcastd %4, %%zmm31\n\tvpdpbusd %%zmm31, %2, %0\n\tvpdpbusd %%zmm31, %3, %1"
          : "+v"(a.v), "+v"(b.v)
          : "v"(w0.v), "v"(w1.v), "m"(*reinterpret_cast<const int8_t(*)[4]>(codes + 4 * S))
          : "xmm31");
}

// M rows by the panel `first` and the one after it: sums[m][kSums], of 32 outputs.
template <class Q, int M>
HR_INLINE void twin_rows(Panel first, int blocks, Rows x, float* sums) {
  constexpr hr::Format f = Q::format;
  constexpr int lines = (f.block_bytes() / f.units() + 63) / 64, low_lines = f.low_bytes / 64;
  const int64_t bytes = static_cast<int64_t>(blocks) * f.block_bytes();
  const int64_t low_bytes = static_cast<int64_t>(blocks) * f.units() * f.low_bytes;
  const bool near = hr::fetching.near;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    f_store(sums + m * kSums, f_zero());
    f_store(sums + m * kSums + HR_PANEL, f_zero());
  }
  const uint8_t *block = first.data, *low = first.low;
  const uint8_t* end = first.data + bytes;
  for (int b = 0; b < blocks; ++b, block += f.block_bytes()) {
    for (int u = 0; u < f.units(); ++u, ++x.six, low += f.low_bytes) {
      const uint8_t* units[2] = {block + f.header + u * f.unit_bytes(),
                                 block + bytes + f.header + u * f.unit_bytes()};
      const uint8_t* q[2] = {units[0] + f.unit_extra, units[1] + f.unit_extra};
      const uint8_t* lows[2] = {low, low + low_bytes};
      // Past the end of a panel lies its neighbour, which is being read: on to the next two.
      const int64_t ahead = end - units[0] <= kAhead ? kAhead + bytes : kAhead;
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 9
        for (int i = 0; i < lines; ++i) ask(units[p] + ahead + 64 * i, near);
#pragma GCC unroll 3
        for (int i = 0; i < low_lines; ++i) ask(lows[p] + kAhead + 64 * i, near);
      }
#define HR_UNIT(m) x.six[(m) / HR_SIX * x.stride].lanes[(m) % HR_SIX].unit
#define HR_CODES(m) x.six[(m) / HR_SIX * x.stride].lanes[(m) % HR_SIX].codes
      I sum[M][2];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
        sum[m][0] = sum[m][1] = Q::mode == kMin ? i_zero() : start_from<Q>(HR_UNIT(m));
#define HR_BODY(S)                                                \
  {                                                               \
    const C w0 = code_of<Q, S, kTernary>(q[0], lows[0]);          \
    const C w1 = code_of<Q, S, kTernary>(q[1], lows[1]);          \
    _Pragma("GCC unroll 8") for (int m = 0; m < M; ++m)           \
      twin_step<S>(sum[m][0], sum[m][1], w0, w1, HR_CODES(m));    \
  }
      if constexpr (f.low_bytes != 0) HR_PAIRS8(HR_BODY);
      else HR_STEPS8(HR_BODY);
      const F d[2] = {Q::scale(block, units[0]), Q::scale(block + bytes, units[1])};
      F least[2];
      if constexpr (Q::mode == kMin) {
        least[0] = Q::min(block, units[0]);
        least[1] = Q::min(block + bytes, units[1]);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const F scale = f_set(HR_UNIT(m).scale);
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
          float* to = sums + m * kSums + p * HR_PANEL;
          F acc = f_fma(f_from_i(sum[m][p]), f_mul(d[p], scale), f_load(to));
          if constexpr (Q::mode == kMin) acc = f_fma(least[p], f_set(HR_UNIT(m).sum), acc);
          f_store(to, acc);
        }
      }
#undef HR_BODY
#undef HR_UNIT
#undef HR_CODES
    }
  }
}

}  // namespace

#endif

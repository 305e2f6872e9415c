// A tile of fp32 sums in registers: M rows by P panels of 16 outputs, a plain fma chain over K.
//
// Each sum is one chain, k after k, so a row's bits do not depend on how many rows or panels came
// with it, nor on the level. What bounds a chain is the fma's latency (four cycles); a tile holds
// enough of them for one or two fma a cycle, and its loads, P + M for M · P fma, stay below what a
// core can load beside.
//
// The rows' addresses are kept in threes: three rows are a base, one stride and two strides, which
// an x86 address can say, so that twelve rows take four registers and not twelve.
#pragma once
#include "layout.h"
#include "simd.h"

namespace {

#if HR_LEVEL >= 3
constexpr int kTallest = 12;  // rows of a tile of two panels: 24 of 32 registers hold sums
constexpr int kPair = 2;
#else
constexpr int kTallest = 6;   // sixteen lanes are two or four registers
constexpr int kPair = 1;
#endif

template <int N>
struct Size {
  static constexpr int value = N;
};

template <int K>
HR_INLINE F dense_load(const uint8_t* p, int64_t k) {
  if constexpr (K == HR_F32) return f_load(reinterpret_cast<const float*>(p) + 16 * k);
  const auto* q = reinterpret_cast<const uint16_t*>(p) + 16 * k;
  if constexpr (K == HR_F16) return f_half(q);
  return f_bf16(q);
}

// acc[m][p] = Σ_k x[m · stride + k] · w[p · panel + k]; panels [k][16] of kind K, `panel` bytes
// from one to the next.
template <int K, int M, int P>
HR_INLINE void chain(const float* x, int64_t stride, const uint8_t* w, int64_t panel, int64_t in,
                     F (&acc)[M][P]) {
  constexpr int kThrees = (M + 2) / 3;
  const float* at[kThrees];
  for (int i = 0; i < kThrees; ++i) at[i] = x + 3 * i * stride;
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < P; ++p) acc[m][p] = f_zero();
  for (int64_t k = 0; k < in; ++k) {
    F v[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) v[p] = dense_load<K>(w + p * panel, k);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const F a = f_set(at[m / 3][m % 3 * stride + k]);
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) acc[m][p] = f_fma(a, v[p], acc[m][p]);
    }
  }
}

// body(Size<M>) for a number of rows in 1 … kTallest.
template <class Body>
HR_INLINE void by_rows(int64_t rows, Body body) {
  switch (rows) {
    case 1: return body(Size<1>());
    case 2: return body(Size<2>());
    case 3: return body(Size<3>());
    case 4: return body(Size<4>());
    case 5: return body(Size<5>());
    case 6: return body(Size<6>());
#if HR_LEVEL >= 3
    case 7: return body(Size<7>());
    case 8: return body(Size<8>());
    case 9: return body(Size<9>());
    case 10: return body(Size<10>());
    case 11: return body(Size<11>());
    case 12: return body(Size<12>());
#endif
  }
}

// Rows of the next tile where `left` are left: even shares of as few tiles as can be.
HR_INLINE int64_t tile_of(int64_t left) {
  const int64_t tiles = (left + kTallest - 1) / kTallest;
  return (left + tiles - 1) / tiles;
}

}  // namespace

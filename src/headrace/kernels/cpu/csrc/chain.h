// A tile of fp32 sums in registers: M rows by P panels of 16 outputs, a plain fma chain over K.
//
// Each sum is one chain, k after k (of E4M3 one for each 128, and one of those times their
// scales), so a row's bits do not depend on how many rows or panels came
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

constexpr int64_t kEarly = 8192;      // bytes
constexpr int64_t kEarlyInL1 = 2048;  // of each of four streams
enum Lines { kLeft, kToL2, kToL1 };   // left to the hardware, or asked for

template <int K>
HR_INLINE F dense_load(const uint8_t* p, int64_t k) {
  if constexpr (K == HR_F32) return f_load(reinterpret_cast<const float*>(p) + 16 * k);
  if constexpr (K == HR_E4M3) return f_e4m3(p + 16 * k);
  const auto* q = reinterpret_cast<const uint16_t*>(p) + 16 * k;
  if constexpr (K == HR_F16) return f_half(q);
  return f_bf16(q);
}

// What a tile reads and writes: y[m · y_stride + 16 p + lane] = Σ_k x[m · x_stride + k] · w[p][k].
struct ChainTile {
  const float* x;
  int64_t x_stride;
  const uint8_t* w;  // panels [k][16], `panel` bytes from one to the next
  int64_t panel, in;
  float* y;
  int64_t y_stride;
};

// kLines: the weights come from memory, P streams of them, whose lines are asked for so many bytes
// before. At the end of its panel a stream goes on with the next tile's, P panels further.
template <int K, int M, int P, Lines kLines = kLeft>
__attribute__((noinline)) void chain(const ChainTile& t) {
  constexpr int kThrees = (M + 2) / 3;
  constexpr int64_t ahead = kLines == kToL1 ? kEarlyInL1 : kEarly;
  constexpr auto ask = kLines == kToL1 ? prefetch_l1 : prefetch_l2;
  const float* at[kThrees];
  for (int i = 0; i < kThrees; ++i) at[i] = t.x + 3 * i * t.x_stride;
  const int64_t stride = t.x_stride, panel = t.panel, in = t.in;
  const uint8_t* w = t.w;
  F acc[M][P];
  const auto begin = [&]() __attribute__((always_inline)) {
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[m][p] = f_zero();
  };
  begin();
  const auto step = [&](int64_t k) __attribute__((always_inline)) {
    F v[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) v[p] = dense_load<K>(w + p * panel, k);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const F a = f_set(at[m / 3][m % 3 * stride + k]);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) acc[m][p] = f_fma(a, v[p], acc[m][p]);
    }
  };
  if constexpr (K == HR_E4M3) {
    F sum[M][P];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sum[m][p] = f_zero();
    const uint8_t* scales = w + HR_PANEL * in;
    for (int64_t k = 0; k < in; scales += 4 * HR_PANEL) {
      const int64_t end = in - k < hr::kScaled ? in : k + hr::kScaled;
      for (; k + 4 <= end; k += 4) {
        if constexpr (kLines != kLeft) {
          const int64_t over = panel - k * HR_PANEL <= ahead ? (P - 1) * panel : 0;
#pragma GCC unroll 4
          for (int p = 0; p < P; ++p) ask(w + p * panel + k * HR_PANEL + ahead + over);
        }
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i) step(k + i);
      }
      for (; k < end; ++k) step(k);
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        const F scale = f_load(reinterpret_cast<const float*>(scales + p * panel));
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) sum[m][p] = f_fma(acc[m][p], scale, sum[m][p]);
      }
      begin();
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) f_store(t.y + m * t.y_stride + 16 * p, sum[m][p]);
    return;
  }
  int64_t k = 0;
  if constexpr (kLines != kLeft) {
    constexpr int64_t size = K == HR_F32 ? 64 : 32, each = 64 / size;  // k to a line
    int64_t early = ahead;
    for (; k + each <= in; k += each) {
      if ((in - k) * size <= ahead) early = ahead + (P - 1) * panel;
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) ask(w + p * panel + k * size + early);
#pragma GCC unroll 2
      for (int64_t i = 0; i < each; ++i) step(k + i);
    }
  }
  for (; k < in; ++k) step(k);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) f_store(t.y + m * t.y_stride + 16 * p, acc[m][p]);
}

// A tile of 1 … kTallest rows.
template <int K, int P, Lines kLines = kLeft>
HR_INLINE void chains(int64_t rows, const ChainTile& t) {
  switch (rows) {
    case 1: return chain<K, 1, P, kLines>(t);
    case 2: return chain<K, 2, P, kLines>(t);
    case 3: return chain<K, 3, P, kLines>(t);
    case 4: return chain<K, 4, P, kLines>(t);
    case 5: return chain<K, 5, P, kLines>(t);
    case 6: return chain<K, 6, P, kLines>(t);
#if HR_LEVEL >= 3
    case 7: return chain<K, 7, P, kLines>(t);
    case 8: return chain<K, 8, P, kLines>(t);
    case 9: return chain<K, 9, P, kLines>(t);
    case 10: return chain<K, 10, P, kLines>(t);
    case 11: return chain<K, 11, P, kLines>(t);
    case 12: return chain<K, 12, P, kLines>(t);
#endif
  }
}

// Rows of the next tile where `left` are left: even shares of as few tiles as can be.
HR_INLINE int64_t tile_of(int64_t left) {
  const int64_t tiles = (left + kTallest - 1) / kTallest;
  return (left + tiles - 1) / tiles;
}

}  // namespace

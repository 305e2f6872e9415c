// Sixteen lanes, whatever the machine: the vector vocabulary of the kernels.
//
// Every kernel is written once against these names and compiled once per ISA level (HR_LEVEL); a
// level is a set of these functions:
//   0  simd_neon.h    aarch64               four registers of 128 bits, int8 products by smull
//   1  simd_neon.h    + dot product         int8 products by sdot
//   2  simd_avx2.h    AVX2 + FMA + F16C     two ymm per sixteen lanes, int8 products by vpmaddubsw
//   3  simd_avx512.h  AVX-512 F/BW/DQ/VL    one zmm, int8 products by vpmaddubsw
//   4  simd_avx512.h  AVX-512 + VNNI        one zmm, int8 products by vpdpbusd
//   5  simd_avx512.h  the same + BF16       bf16 products by vdpbf16ps (pairs.h)
// The levels give the same bits: integer sums are exact, float operations are the same fused
// operations in the same order. Only `exp` and reductions could differ and they do not: they are
// built from the same primitives.
//
//   F, I, C         sixteen fp32 or int32 lanes; 64 code bytes: 16 outputs × 4 steps of K
//   f_max, f_min    a where a > b (a < b), else b: the second operand when one is NaN
//   i_round         to nearest even; of a NaN or a number too large anything
//   i_store_s8      lanes are within −128 … 127, else anything
//   f_store_bf16    to nearest even; NaN stays NaN
//   c_shift<N>      left when positive; bits cross bytes, the caller masks
//   c_select        bits of a where mask is 1, of b elsewhere
//   c_find          the bytes of a table of sixteen that codes below sixteen name
//   c_or            as it stands, never made one ternary operation with an and
//   f_not_below     a bit for each lane with x ≥ least
//   f_where         value in lanes with x ≥ least, else zero
//   f_unless_below  value in lanes without x < least (a NaN is not below), else zero
//   f_e4m3          sixteen numbers of eight bits (layout.h), each divided by 256
//   i_spread        one number for all lanes, straight from memory
//
// int8 products: acc[o] += Σ_{j<4} w[o, j] · a[j], four activations for all outputs. Codes of up
// to 7 bits are the same signed or unsigned. Eight-bit codes are stored with +128: where a level
// multiplies them so the caller subtracts 128 · Σa, elsewhere the product is of the signed weight
// already (`kSigned8`).
//
//   dot7, dot8      the four activations in an integer
//   dot_step        in memory: those of step S of a unit
//
// Everything here has internal linkage on purpose: an inline function that two levels share by
// name would be merged by the linker, and AVX-512 code would run on a machine without it.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(HR_LEVEL)
#error "HR_LEVEL must be one of the levels above"
#endif

#define HR_INLINE static inline __attribute__((always_inline))

#if HR_LEVEL >= 3
#include "simd_avx512.h"
#elif HR_LEVEL == 2
#include "simd_avx2.h"
#else
#include "simd_neon.h"
#endif

namespace {

#if HR_LEVEL == 2 || HR_LEVEL == 3
template <bool kEight, int S>
HR_INLINE I dot_step(I acc, C w, const int8_t* codes) {
  int32_t a4;
  memcpy(&a4, codes + 4 * S, 4);
  if constexpr (kEight) return dot8(acc, w, a4);
  return dot7(acc, w, a4);
}
#endif

// A line that is read soon: into the first level, or only into the second.
HR_INLINE void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }
HR_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// A store that is one: without the empty statement GCC keeps x in a register and spills another.
HR_INLINE void f_put_away(float* p, F x) {
  f_store(p, x);
  __asm__ volatile("" : "+m"(*reinterpret_cast<float(*)[16]>(p)));
}

// ---- built from the above: the same bits at every level

HR_INLINE float f_sum(F x) {  // a fixed tree over the sixteen lanes
  float t[16];
  f_store(t, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) t[i] += t[i + width];
  return t[0];
}
HR_INLINE float f_highest(F x) {
  float t[16];
  f_store(t, x);
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; ++i) t[i] = t[i] > t[i + width] ? t[i] : t[i + width];
  return t[0];
}

// exp(x) for x ≤ 88: 2^k · p(f), k = round(x / ln 2), |f| ≤ ln 2 / 2, a degree-6 polynomial
// (Cody and Waite's range reduction; minimax coefficients as in Cephes' expf). Relative error
// below 2e-7; x below −87.3 gives 0; NaN stays NaN.
HR_INLINE F f_exp(F x) {
  F low = f_set(-87.33f);
  F y = f_max(low, x);
  I k = i_round(f_mul(y, f_set(1.44269504088896341f)));
  F kf = f_from_i(k);
  F r = f_fnma(kf, f_set(0.693359375f), y);
  r = f_fnma(kf, f_set(-2.12194440e-4f), r);
  F p = f_set(1.9875691500e-4f);
  p = f_fma(p, r, f_set(1.3981999507e-3f));
  p = f_fma(p, r, f_set(8.3334519073e-3f));
  p = f_fma(p, r, f_set(4.1665795894e-2f));
  p = f_fma(p, r, f_set(1.6666665459e-1f));
  p = f_fma(p, r, f_set(5.0000001201e-1f));
  p = f_fma(p, f_mul(r, r), f_add(r, f_set(1.0f)));
  F scale = f_bits(i_shl<23>(i_add(k, i_set(127))));
  F e = f_mul(p, scale);
  return f_unless_below(x, low, e);  // exactly zero below the range
}

}  // namespace

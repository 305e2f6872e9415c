// Products of bf16 in pairs, fp32 sums: what attention over bf16 KV is made of.
//
// A cell vector holds sixteen lanes of two bf16; a dot adds both products to each lane. AVX512-BF16
// does it in one instruction (vdpbf16ps): twice the multiply-adds of fp32 a cycle. It adds the odd
// product, then the even one, each rounded once, and a product of two bf16 is exact in fp32: so two
// fused multiply-adds in that order give the same bits, and the other levels do that (measured
// on Zen 4: 3.2 million of 3.2 million random lanes). The one exception are denormals, which the
// instruction takes as zero; in attention they cannot arise but from cached values below 1e-8.
//
// Rows (queries, weights of positions) lie as bf16 where the instruction exists and as fp32 that
// was rounded to bf16 elsewhere, so that a broadcast is one load at every level.
#pragma once
#include "simd.h"

namespace {

#if HR_LEVEL >= 5

using PairRow = uint16_t;
struct B {
  __m512i v;
};
HR_INLINE B b_load(const uint16_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE B b_spread(const uint16_t* row) {
  int32_t pair;
  memcpy(&pair, row, 4);
  return {_mm512_set1_epi32(pair)};
}
HR_INLINE F b_dot(F acc, B w, B x) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(w.v), reinterpret_cast<__m512bh>(x.v))};
}
HR_INLINE void b_round(uint16_t* row, F x) {  // sixteen values, rounded to nearest even
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x.v)));
}
HR_INLINE void b_round2(uint16_t* row, F x, F y) {
  _mm512_storeu_si512(row, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y.v, x.v)));
}

#else

using PairRow = float;
struct B {
  F even, odd;
};
HR_INLINE B b_load(const uint16_t* p) {
  int32_t raw[16];
  memcpy(raw, p, 64);
  I pairs = i_load(raw);
  return {f_bits(i_shl<16>(pairs)), f_bits(i_and(pairs, i_set(static_cast<int32_t>(0xffff0000u))))};
}
HR_INLINE B b_spread(const float* row) { return {f_set(row[0]), f_set(row[1])}; }
HR_INLINE F b_dot(F acc, B w, B x) { return f_fma(w.even, x.even, f_fma(w.odd, x.odd, acc)); }
HR_INLINE void b_round(float* row, F x) {
  uint16_t narrow[16];
  f_store_bf16(narrow, x);
  f_store(row, f_bf16(narrow));
}
HR_INLINE void b_round2(float* row, F x, F y) {
  b_round(row, x);
  b_round(row + 16, y);
}

#endif

// One number.
constexpr uint16_t kNotANumber = 0x7fc0;
HR_INLINE float float_of(uint16_t narrow) {
  const uint32_t bits = static_cast<uint32_t>(narrow) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
HR_INLINE uint16_t bf16_of(float x) {  // to nearest even
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return x == x ? static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : kNotANumber;
}
HR_INLINE uint16_t bf16_above(float x) {  // the least that is no less than x ≥ 0
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return x == x ? static_cast<uint16_t>((bits + 0xffff) >> 16) : kNotANumber;
}

// 2^x for x ≤ 0: below −100 exactly 0; NaN stays NaN, and 2^0 is exactly 1. A polynomial on [0, 1)
// of what x is above its floor, of degree 5 (relative error below 2e-7) or 4 (below 3e-6, where the
// result is rounded to bf16: 2e-3).
template <int kDegree>
HR_INLINE F f_exp2(F x) {
#if HR_LEVEL >= 3
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(-100.0f), _CMP_NLT_UQ);
  F r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF)};
#else
  // vreduceps rounds what is left of x downwards, to a multiple of 2^-24 where x is above −1/2; all
  // other differences are exact. So x is rounded down to such a multiple first.
  F y = f_max(f_set(-101.0f), x);
  y = f_mul(f_floor(f_mul(y, f_set(16777216.0f))), f_set(1.0f / 16777216.0f));
  F k = f_floor(y);
  F r = f_sub(y, k);
#endif
  F p;
  if constexpr (kDegree == 5) {
    p = f_fma(f_set(0.00186713f), r, f_set(0.00901703f));
    p = f_fma(p, r, f_set(0.05579991f));
    p = f_fma(p, r, f_set(0.24016445f));
    p = f_fma(p, r, f_set(0.69315131f));
  } else {
    static_assert(kDegree == 4);
    p = f_fma(f_set(0.01342669f), r, f_set(0.05224246f));
    p = f_fma(p, r, f_set(0.24128021f));
    p = f_fma(p, r, f_set(0.69304484f));
  }
  p = f_fma(p, r, f_set(1.0f));
#if HR_LEVEL >= 3
  return {_mm512_maskz_scalef_ps(keep, p.v, x.v)};  // p · 2^floor(x)
#else
  F e = f_mul(p, f_bits(i_shl<23>(i_add(i_round(k), i_set(127)))));
  return f_unless_below(x, f_set(-100.0f), e);
#endif
}

// Lanes from … to − 1 of x, `other` elsewhere.
HR_INLINE F f_range(F x, int from, int to, float other) {
  if (from <= 0 && to >= 16) return x;
#if HR_LEVEL >= 3
  const int high = to <= 0 ? 0 : to >= 16 ? 16 : to, low = from <= 0 ? 0 : from >= 16 ? 16 : from;
  const auto mask = static_cast<__mmask16>(((1u << high) - 1) & ~((1u << low) - 1));
  return {_mm512_mask_blend_ps(mask, _mm512_set1_ps(other), x.v)};
#else
  float lanes[16];
  f_store(lanes, x);
  for (int i = 0; i < 16; ++i)
    if (i < from || i >= to) lanes[i] = other;
  return f_load(lanes);
#endif
}

}  // namespace

// The vocabulary of simd.h for AVX-512: sixteen lanes are one zmm.
#pragma once
#include <immintrin.h>

namespace {

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct C {  // 64 code bytes: 16 outputs × 4 steps of K
  __m512i v;
};

HR_INLINE F f_zero() { return {_mm512_setzero_ps()}; }
HR_INLINE F f_set(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE F f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE void f_store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
HR_INLINE F f_add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE F f_sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
HR_INLINE F f_mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE F f_div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
HR_INLINE F f_max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
HR_INLINE F f_min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
HR_INLINE F f_fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE F f_fnma(F a, F b, F c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE F f_from_i(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
HR_INLINE F f_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
HR_INLINE F f_e4m3(const uint8_t* p) {
  __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  x = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  return {_mm512_cvtph_ps(x)};
}
HR_INLINE void f_store_half(uint16_t* p, F a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, 0));
}
HR_INLINE F f_bf16(const uint16_t* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(w, 16))};
}
HR_INLINE I i_zero() { return {_mm512_setzero_si512()}; }
HR_INLINE I i_set(int32_t x) { return {_mm512_set1_epi32(x)}; }
HR_INLINE I i_load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE void i_store(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
HR_INLINE I i_add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
HR_INLINE I i_sub(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
HR_INLINE I i_and(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
HR_INLINE I i_max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int N>
HR_INLINE I i_shl(I a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
HR_INLINE I i_shr(I a) {  // arithmetic
  return {_mm512_srai_epi32(a.v, N)};
}
HR_INLINE I i_round(F a) { return {_mm512_cvtps_epi32(a.v)}; }
HR_INLINE I i_bits(F a) { return {_mm512_castps_si512(a.v)}; }
HR_INLINE F f_bits(I a) { return {_mm512_castsi512_ps(a.v)}; }
HR_INLINE I i_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
HR_INLINE I i_s8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
HR_INLINE void i_store_s8(int8_t* p, I a) {  // lanes are within −128 … 127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
HR_INLINE void f_store_bf16(uint16_t* p, F a) {  // round to nearest even; NaN stays NaN
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  r = _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16)));
}
HR_INLINE F f_floor(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEG_INF)}; }
HR_INLINE float f_half(uint16_t x) { return _cvtsh_ss(x); }
HR_INLINE uint32_t f_not_below(F x, F least) {
  return _mm512_cmp_ps_mask(x.v, least.v, _CMP_GE_OQ);
}
HR_INLINE F f_where(F x, F least, F value) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, least.v, _CMP_GE_OQ), value.v)};
}
HR_INLINE F f_unless_below(F x, F least, F value) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, least.v, _CMP_NLT_UQ), value.v)};
}
HR_INLINE I i_spread(const int32_t* p) {  // GCC would load into an integer register first
  I a;
  __asm__("vpbroadcastd %1, %0" : "=v"(a.v) : "m"(*p));
  return a;
}
HR_INLINE int32_t i_highest(I a) { return _mm512_reduce_max_epi32(a.v); }
HR_INLINE int32_t i_sum(I a) { return _mm512_reduce_add_epi32(a.v); }

HR_INLINE C c_load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE void c_store(uint8_t* p, C a) { _mm512_storeu_si512(p, a.v); }
HR_INLINE C c_set(uint8_t x) { return {_mm512_set1_epi8(static_cast<char>(x))}; }
HR_INLINE C c_and(C a, C b) { return {_mm512_and_si512(a.v, b.v)}; }
// Bits of a where mask is 1, of b elsewhere.
HR_INLINE C c_select(C mask, C a, C b) {
  return {_mm512_ternarylogic_epi32(mask.v, a.v, b.v, 0xCA)};
}
HR_INLINE C c_or(C a, C b) {  // as it stands: GCC would make one vpternlog of it and an and
  __asm__("vpord %2, %1, %0" : "=v"(a.v) : "v"(a.v), "v"(b.v));
  return a;
}
HR_INLINE C c_find(const uint8_t* table, C at) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), at.v)};
}
template <int N>
HR_INLINE C c_shift(C a) {  // left when positive; bits cross bytes, the caller masks
  if constexpr (N > 0) return {_mm512_slli_epi16(a.v, N)};
  if constexpr (N < 0) return {_mm512_srli_epi16(a.v, -N)};
  return a;
}

#if HR_LEVEL >= 4
constexpr bool kSigned8 = false, kOneDot = true;
HR_INLINE I dot7(I acc, C w, int32_t a4) {
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(a4))};
}
HR_INLINE I i_dot(I acc, C w, I x) {  // of the intrinsic GCC 12 makes copies of the sums
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc.v) : "v"(w.v), "v"(x.v));
  return acc;
}
// A load that broadcasts is part of vpdpbusd, which GCC 12 does not make of the intrinsics; it
// saves an instruction and a register per product.
template <bool kEight, int S>
HR_INLINE I dot_step(I acc, C w, const int8_t* codes) {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0"
          : "+v"(acc.v)
          : "v"(w.v), "m"(*reinterpret_cast<const int8_t(*)[4]>(codes + 4 * S)));
  return acc;
}
#else  // vpmaddubsw would saturate on eight bits: it takes |w| and ±a
constexpr bool kSigned8 = true, kOneDot = false;
HR_INLINE I dot7(I acc, C w, int32_t a4) {
  __m512i pairs = _mm512_maddubs_epi16(w.v, _mm512_set1_epi32(a4));
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
HR_INLINE I dot8(I acc, C w, int32_t a4) {
  __m512i s = _mm512_xor_si512(w.v, _mm512_set1_epi8(static_cast<char>(0x80)));
  __m512i a = _mm512_set1_epi32(a4);
  a = _mm512_mask_sub_epi8(a, _mm512_movepi8_mask(s), _mm512_setzero_si512(), a);
  __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(s), a);
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#endif

}  // namespace

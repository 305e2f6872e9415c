// The vocabulary of simd.h for AVX2: sixteen lanes are two ymm.
#pragma once
#include <immintrin.h>

namespace {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};
struct C {
  __m256i a, b;
};

HR_INLINE const __m256i* as256(const void* p) { return reinterpret_cast<const __m256i*>(p); }
HR_INLINE F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HR_INLINE F f_set(float x) {
  __m256 v = _mm256_set1_ps(x);
  return {v, v};
}
HR_INLINE F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void f_store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
#define HR_F2(name, op)                                      \
  HR_INLINE F name(F x, F y) {                               \
    return {_mm256_##op##_ps(x.a, y.a), _mm256_##op##_ps(x.b, y.b)}; \
  }
HR_F2(f_add, add)
HR_F2(f_sub, sub)
HR_F2(f_mul, mul)
HR_F2(f_div, div)
HR_F2(f_max, max)
HR_F2(f_min, min)
#undef HR_F2
HR_INLINE F f_fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
HR_INLINE F f_fnma(F x, F y, F z) {
  return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)};
}
HR_INLINE F f_from_i(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
HR_INLINE F f_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
HR_INLINE F f_e4m3(const uint8_t* p) {
  __m256i x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  x = _mm256_and_si256(_mm256_slli_epi16(x, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
HR_INLINE void f_store_half(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, 0));
}
HR_INLINE F f_bf16(const uint16_t* p) {
  __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
HR_INLINE I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
HR_INLINE I i_set(int32_t x) {
  __m256i v = _mm256_set1_epi32(x);
  return {v, v};
}
HR_INLINE I i_load(const int32_t* p) {
  return {_mm256_loadu_si256(as256(p)), _mm256_loadu_si256(as256(p + 8))};
}
HR_INLINE void i_store(int32_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
#define HR_I2(name, op) \
  HR_INLINE I name(I x, I y) { return {_mm256_##op(x.a, y.a), _mm256_##op(x.b, y.b)}; }
HR_I2(i_add, add_epi32)
HR_I2(i_sub, sub_epi32)
HR_I2(i_and, and_si256)
HR_I2(i_max, max_epi32)
#undef HR_I2
template <int N>
HR_INLINE I i_shl(I x) {
  return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
HR_INLINE I i_shr(I x) {
  return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
HR_INLINE I i_round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
HR_INLINE I i_bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
HR_INLINE F f_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
HR_INLINE I i_u8(const uint8_t* p) {
  __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(v), _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))};
}
HR_INLINE I i_s8(const int8_t* p) {
  __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
}
HR_INLINE void i_store_s8(int8_t* p, I x) {
  __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  __m128i v = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
}
HR_INLINE __m128i bf16_eight(__m256 x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
  r = _mm256_srli_epi32(r, 16);
  r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0xD8);
  return _mm256_castsi256_si128(r);
}
HR_INLINE void f_store_bf16(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bf16_eight(x.a));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), bf16_eight(x.b));
}
HR_INLINE F f_floor(F x) { return {_mm256_floor_ps(x.a), _mm256_floor_ps(x.b)}; }
HR_INLINE float f_half(uint16_t x) { return _cvtsh_ss(x); }
HR_INLINE uint32_t f_not_below(F x, F least) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, least.a, _CMP_GE_OQ))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, least.b, _CMP_GE_OQ))) << 8;
}
HR_INLINE F f_where(F x, F least, F value) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, least.a, _CMP_GE_OQ), value.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, least.b, _CMP_GE_OQ), value.b)};
}
HR_INLINE F f_unless_below(F x, F least, F value) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, least.a, _CMP_NLT_UQ), value.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, least.b, _CMP_NLT_UQ), value.b)};
}
HR_INLINE I i_spread(const int32_t* p) { return i_set(*p); }
HR_INLINE int32_t i_highest(I x) {
  int32_t t[16];
  i_store(t, x);
  int32_t highest = t[0];
  for (int i = 1; i < 16; ++i) highest = t[i] > highest ? t[i] : highest;
  return highest;
}
HR_INLINE int32_t i_sum(I x) {
  int32_t t[16], total = 0;
  i_store(t, x);
  for (int i = 0; i < 16; ++i) total += t[i];
  return total;
}

HR_INLINE C c_load(const uint8_t* p) {
  return {_mm256_loadu_si256(as256(p)), _mm256_loadu_si256(as256(p + 32))};
}
HR_INLINE C c_set(uint8_t x) {
  __m256i v = _mm256_set1_epi8(static_cast<char>(x));
  return {v, v};
}
HR_INLINE C c_and(C x, C y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
HR_INLINE C c_select(C mask, C x, C y) {
  return {_mm256_or_si256(_mm256_and_si256(mask.a, x.a), _mm256_andnot_si256(mask.a, y.a)),
          _mm256_or_si256(_mm256_and_si256(mask.b, x.b), _mm256_andnot_si256(mask.b, y.b))};
}
HR_INLINE C c_or(C x, C y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
HR_INLINE C c_find(const uint8_t* table, C at) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  const __m256i twice = _mm256_broadcastsi128_si256(bytes);
  return {_mm256_shuffle_epi8(twice, at.a), _mm256_shuffle_epi8(twice, at.b)};
}
template <int N>
HR_INLINE C c_shift(C x) {
  if constexpr (N > 0) return {_mm256_slli_epi16(x.a, N), _mm256_slli_epi16(x.b, N)};
  if constexpr (N < 0) return {_mm256_srli_epi16(x.a, -N), _mm256_srli_epi16(x.b, -N)};
  return x;
}

// vpmaddubsw would saturate on eight bits: it takes |w| and ±a.
constexpr bool kSigned8 = true, kOneDot = false;
HR_INLINE __m256i dot7_half(__m256i acc, __m256i w, __m256i a) {
  __m256i pairs = _mm256_maddubs_epi16(w, a);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
HR_INLINE I dot7(I acc, C w, int32_t a4) {
  __m256i a = _mm256_set1_epi32(a4);
  return {dot7_half(acc.a, w.a, a), dot7_half(acc.b, w.b, a)};
}
HR_INLINE __m256i dot8_half(__m256i acc, __m256i w, __m256i a) {
  __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8(static_cast<char>(0x80)));
  return dot7_half(acc, _mm256_abs_epi8(s), _mm256_sign_epi8(a, s));
}
HR_INLINE I dot8(I acc, C w, int32_t a4) {
  __m256i a = _mm256_set1_epi32(a4);
  return {dot8_half(acc.a, w.a, a), dot8_half(acc.b, w.b, a)};
}

}  // namespace

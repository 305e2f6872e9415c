// Sixteen lanes, whatever the machine: the vector vocabulary of the kernels.
//
// Every kernel is written once against these names and compiled once per ISA level (HR_LEVEL):
//   2  AVX2 + FMA + F16C     two ymm per sixteen lanes, int8 products by vpmaddubsw
//   3  AVX-512 F/BW/DQ/VL    one zmm, int8 products by vpmaddubsw
//   4  AVX-512 + VNNI        one zmm, int8 products by vpdpbusd
//   5  the same + BF16       bf16 products by vdpbf16ps (pairs.h)
// The levels give the same bits: integer sums are exact, float operations are the same fused
// operations in the same order. Only `exp` and reductions could differ and they do not: they are
// built from the same primitives.
//
// Everything here has internal linkage on purpose: an inline function that two levels share by
// name would be merged by the linker, and AVX-512 code would run on a machine without it.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(HR_LEVEL)
#error "HR_LEVEL must be 2, 3, 4 or 5"
#endif

#define HR_INLINE static inline __attribute__((always_inline))

namespace {

#if HR_LEVEL >= 3

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

HR_INLINE C c_load(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
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
template <int N>
HR_INLINE C c_shift(C a) {  // left when positive; bits cross bytes, the caller masks
  if constexpr (N > 0) return {_mm512_slli_epi16(a.v, N)};
  if constexpr (N < 0) return {_mm512_srli_epi16(a.v, -N)};
  return a;
}

#else  // AVX2

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
template <int N>
HR_INLINE C c_shift(C x) {
  if constexpr (N > 0) return {_mm256_slli_epi16(x.a, N), _mm256_slli_epi16(x.b, N)};
  if constexpr (N < 0) return {_mm256_srli_epi16(x.a, -N), _mm256_srli_epi16(x.b, -N)};
  return x;
}

#endif

// ---- int8 products: acc[o] += Σ_{j<4} w[o, j] · a[j], one dword of activations for all outputs.
//
// Codes of up to 7 bits go in unsigned (vpdpbusd, or vpmaddubsw whose 16-bit pair sums stay below
// 2 · 127 · 127). Eight-bit codes are stored with +128; vpdpbusd takes them so and the caller
// subtracts 128 · Σa, while vpmaddubsw would saturate and takes |w| and ±a instead: there the
// product is of the signed weight already (`kSigned8`).

#if HR_LEVEL >= 4
constexpr bool kSigned8 = false;
HR_INLINE I dot7(I acc, C w, int32_t a4) {
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(a4))};
}
HR_INLINE I dot8(I acc, C w, int32_t a4) { return dot7(acc, w, a4); }
#elif HR_LEVEL == 3
constexpr bool kSigned8 = true;
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
#else
constexpr bool kSigned8 = true;
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
#endif

// The same with the four activations in memory: a load that broadcasts is part of vpdpbusd, which
// GCC 12 does not make of the intrinsics; it saves an instruction and a register per product.
template <bool kEight>
HR_INLINE I dot_at(I acc, C w, const int8_t* a) {
#if HR_LEVEL >= 4
  __asm__("vpdpbusd %2%{1to16%}, %1, %0"
          : "+v"(acc.v)
          : "v"(w.v), "m"(*reinterpret_cast<const int8_t(*)[4]>(a)));
  return acc;
#else
  int32_t a4;
  memcpy(&a4, a, 4);
  if constexpr (kEight) return dot8(acc, w, a4);
  return dot7(acc, w, a4);
#endif
}

// One number for all lanes, straight from memory: GCC likes to load early into an integer register
// and to broadcast that, which takes a port from the products.
HR_INLINE I i_spread(const int32_t* p) {
#if HR_LEVEL >= 3
  I a;
  __asm__("vpbroadcastd %1, %0" : "=v"(a.v) : "m"(*p));
  return a;
#else
  return i_set(*p);
#endif
}

// A store that is one: without the empty statement GCC keeps x in a register and spills another.
HR_INLINE void f_put_away(float* p, F x) {
  f_store(p, x);
  __asm__ volatile("" : "+m"(*reinterpret_cast<float(*)[16]>(p)));
}

HR_INLINE uint32_t f_not_below(F x, F least) {  // a bit for each lane with x ≥ least
#if HR_LEVEL >= 3
  return _mm512_cmp_ps_mask(x.v, least.v, _CMP_GE_OQ);
#else
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.a, least.a, _CMP_GE_OQ))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.b, least.b, _CMP_GE_OQ))) << 8;
#endif
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
  F y = f_max(low, x);  // vmaxps returns its second operand when one is NaN
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
  // Exactly zero below the range: x < low ⇔ the sign bit of x − low is set (and x is no NaN).
  I keep = i_shr<31>(i_bits(f_sub(x, low)));
  return f_bits(i_and(i_bits(e), i_sub(i_set(-1), keep)));
}

}  // namespace

// Products of whole numbers: rows of 15 bits by cells of eight, four a step, exact in int32. What
// attention over KV in codes is made of.
//
// A cell vector holds sixteen lanes of four bytes: codes of K with 128 added, codes of V signed. A
// row holds four numbers in eight bytes, as its level multiplies them. With VNNI those are two
// planes, the upper bytes and the lower ones, and a dot is two vpdpbusd, each of which takes
// unsigned bytes by signed ones: cells of K by a query's, a weight's by cells of V. So nothing is
// widened, and with both planes a multiply-add costs what it does in bf16 (pairs.h) on a machine
// that has vpdpbusd and vdpbf16ps at one rate, and less where the second is the slower (measured on
// Emerald Rapids: 3.2 against 1.1 · 10⁹ a second). Elsewhere cells become int16 by two operations
// (three of V) and meet pairs of int16: the first and the third of the four, the second and the
// fourth.
//
// Every sum is the same whole number at every level, whatever the order.
#pragma once
#include "simd.h"

namespace {

constexpr float kRowCodes = 16383;      // of a query's largest number, either sign
constexpr float kWeightCodes = 32767;   // of a weight of one
constexpr float kCoarseRowCodes = 127, kCoarseWeightCodes = 255;  // which the lower plane holds
constexpr int kCellZero = 128;          // the code zero in a cell of K
// Numbers of a head, at most 1,024 (backend.py): such a product is exact in int32, and so is what
// the code zero of its keys adds.
static_assert(127ll * 16383 * 1024 < 1ll << 31 && kCellZero * 16383ll * 1024 < 1ll << 31);

#if HR_LEVEL >= 4  // two planes

constexpr int kPlanes = 2;
using Plane = I;  // of four numbers of a row, in every lane
using CellsK = C;
using CellsV = C;
HR_INLINE I whole_sum(I upper, I lower) { return i_add(i_shl<8>(upper), lower); }
HR_INLINE CellsK k_cells(C x) { return x; }
HR_INLINE CellsV v_cells(C x) { return x; }
template <int P>
HR_INLINE Plane spread(const int16_t* row) {
  return i_spread(reinterpret_cast<const int32_t*>(row) + P);
}
HR_INLINE I k_dot(I sum, CellsK k, Plane q) {  // of the intrinsic GCC 12 makes copies of the sums
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(k.v), "v"(q.v));
  return sum;
}
HR_INLINE I v_dot(I sum, CellsV v, Plane w) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(v.v));
  return sum;
}
HR_INLINE void store_planes(int16_t* row, __m256i codes) {
  const __m256i upper_first = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm256_shuffle_epi8(codes, upper_first));
}
HR_INLINE void store_query(int16_t* row, I codes) {  // 256 · upper + lower, both signed
  const __m256i up = _mm256_add_epi16(_mm512_cvtepi32_epi16(codes.v), _mm256_set1_epi16(128));
  store_planes(row, _mm256_xor_si256(up, _mm256_set1_epi16(128)));
}
HR_INLINE void store_weights(int16_t* row, I codes) {  // both unsigned
  store_planes(row, _mm512_cvtepi32_epi16(codes.v));
}

#else  // pairs of int16

constexpr int kPlanes = 1;

#if HR_LEVEL >= 2

#if HR_LEVEL == 3
using Wide = __m512i;
#define HR_WIDE(name) _mm512_##name
HR_INLINE C c_both(C x, Wide (*f)(Wide)) { return {f(x.v)}; }
HR_INLINE I add_products(I s, C x, Wide y) {
  return {_mm512_add_epi32(s.v, _mm512_madd_epi16(x.v, y))};
}
#else
using Wide = __m256i;
#define HR_WIDE(name) _mm256_##name
HR_INLINE C c_both(C x, Wide (*f)(Wide)) { return {f(x.a), f(x.b)}; }
HR_INLINE I add_products(I s, C x, Wide y) {
  return {_mm256_add_epi32(s.a, _mm256_madd_epi16(x.a, y)),
          _mm256_add_epi32(s.b, _mm256_madd_epi16(x.b, y))};
}
#endif
struct Plane {
  Wide even, odd;
};
struct CellsK {
  C even, odd;
};
using CellsV = CellsK;
HR_INLINE Wide odd_unsigned(Wide x) { return HR_WIDE(srli_epi16)(x, 8); }
HR_INLINE Wide odd_signed(Wide x) { return HR_WIDE(srai_epi16)(x, 8); }
HR_INLINE Wide even_signed(Wide x) { return odd_signed(HR_WIDE(slli_epi16)(x, 8)); }
HR_INLINE Wide even_unsigned(Wide x) { return odd_unsigned(HR_WIDE(slli_epi16)(x, 8)); }
HR_INLINE CellsK k_cells(C x) {
  return {c_both(x, even_unsigned), c_both(x, odd_unsigned)};
}
HR_INLINE CellsV v_cells(C x) {
  return {c_both(x, even_signed), c_both(x, odd_signed)};
}
template <int>
HR_INLINE Plane spread(const int16_t* row) {
  int32_t pairs[2];
  memcpy(pairs, row, 8);
  return {HR_WIDE(set1_epi32)(pairs[0]), HR_WIDE(set1_epi32)(pairs[1])};
}
HR_INLINE I k_dot(I sum, const CellsK& x, const Plane& q) {
  return add_products(add_products(sum, x.even, q.even), x.odd, q.odd);
}
HR_INLINE void store_weights(int16_t* row, I codes) {
#if HR_LEVEL == 3
  const __m256i narrow = _mm512_cvtepi32_epi16(codes.v);
#else
  const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packs_epi32(codes.a, codes.b), 0xD8);
#endif
  const __m256i pairs = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row), _mm256_shuffle_epi8(narrow, pairs));
}
#undef HR_WIDE

#else  // aarch64

struct Plane {
  int16x8_t even, odd;
};
struct CellsK {
  int16x8_t even[4], odd[4];
};
using CellsV = CellsK;
HR_INLINE CellsK k_cells(C from) {
  CellsK x;
  for (int i = 0; i < 4; ++i) {
    const uint16x8_t both = vreinterpretq_u16_u8(from.q[i]);
    x.even[i] = vreinterpretq_s16_u16(vandq_u16(both, vdupq_n_u16(255)));
    x.odd[i] = vreinterpretq_s16_u16(vshrq_n_u16(both, 8));
  }
  return x;
}
HR_INLINE CellsV v_cells(C from) {
  CellsV x;
  for (int i = 0; i < 4; ++i) {
    const int16x8_t both = vreinterpretq_s16_u8(from.q[i]);
    x.even[i] = vshrq_n_s16(vshlq_n_s16(both, 8), 8);
    x.odd[i] = vshrq_n_s16(both, 8);
  }
  return x;
}
template <int>
HR_INLINE Plane spread(const int16_t* row) {
  int32_t pairs[2];
  memcpy(pairs, row, 8);
  return {vreinterpretq_s16_s32(vdupq_n_s32(pairs[0])), vreinterpretq_s16_s32(vdupq_n_s32(pairs[1]))};
}
HR_INLINE I k_dot(I sum, const CellsK& x, const Plane& q) {
  for (int i = 0; i < 4; ++i) {
    int32x4_t low = vmull_s16(vget_low_s16(x.even[i]), vget_low_s16(q.even));
    int32x4_t high = vmull_high_s16(x.even[i], q.even);
    low = vmlal_s16(low, vget_low_s16(x.odd[i]), vget_low_s16(q.odd));
    high = vmlal_high_s16(high, x.odd[i], q.odd);
    sum.q[i] = vaddq_s32(sum.q[i], vpaddq_s32(low, high));
  }
  return sum;
}
HR_INLINE void store_weights(int16_t* row, I codes) {
  for (int i = 0; i < 4; ++i) {
    const int16x4_t four = vmovn_s32(codes.q[i]);
    const int32x2_t even = vreinterpret_s32_s16(vuzp1_s16(four, four));
    const int32x2_t odd = vreinterpret_s32_s16(vuzp2_s16(four, four));
    vst1_s16(row + 4 * i, vreinterpret_s16_s32(vzip1_s32(even, odd)));
  }
}

#endif

HR_INLINE I v_dot(I sum, const CellsV& x, const Plane& w) { return k_dot(sum, x, w); }
HR_INLINE void store_query(int16_t* row, I codes) { store_weights(row, codes); }

#endif

// Four positions of four numbers each, cells of K, to four numbers of four positions, cells of V.
HR_INLINE void turn_cells(const uint8_t* from, uint8_t* to) {
  for (int position = 0; position < 4; ++position)
    for (int e = 0; e < 4; ++e)
      to[4 * e + position] = static_cast<uint8_t>(from[4 * position + e] ^ kCellZero);
}

}  // namespace

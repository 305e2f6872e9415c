// Several vectors of sixteen lanes to one number each, all at once.
//
// A sum or a maximum over the lanes of one vector is four steps, each of which waits for the one
// before. Eight vectors share those steps: 23 operations, where one by one they take some sixty.
// Each vector's tree is that of f_sum: lanes i and i + 8, then i and i + 4, i + 2, i + 1.
#pragma once
#include "simd.h"

namespace {

struct Add {
  HR_INLINE F of(F a, F b) { return f_add(a, b); }
};
struct Max {
  HR_INLINE F of(F a, F b) { return f_max(a, b); }
};
struct AddInts {  // of the lanes' bits
  HR_INLINE F of(F a, F b) { return f_bits(i_add(i_bits(a), i_bits(b))); }
};
struct MaxInts {
  HR_INLINE F of(F a, F b) { return f_bits(i_max(i_bits(a), i_bits(b))); }
};

// Lane m is vector m's, for M ≤ 8; the lanes behind those repeat some of them.
template <class Op, int M>
HR_INLINE F f_fold(const F (&v)[M]) {
#if HR_LEVEL >= 3
  __m512 eights[4], fours[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512 a = v[2 * i < M ? 2 * i : 0].v, b = v[2 * i + 1 < M ? 2 * i + 1 : 0].v;
    eights[i] = Op::of({_mm512_shuffle_f32x4(a, b, 0x44)}, {_mm512_shuffle_f32x4(a, b, 0xee)}).v;
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m512 a = eights[2 * i], b = eights[2 * i + 1];
    fours[i] = Op::of({_mm512_shuffle_f32x4(a, b, 0x88)}, {_mm512_shuffle_f32x4(a, b, 0xdd)}).v;
  }
  const F twos = Op::of({_mm512_unpacklo_ps(fours[0], fours[1])},
                        {_mm512_unpackhi_ps(fours[0], fours[1])});
  const F ones = Op::of(twos, {_mm512_permute_ps(twos.v, 0x4e)});
  return {_mm512_permutexvar_ps(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13), ones.v)};
#elif HR_LEVEL <= 1
  F fours[2], low, high;  // of vectors 4 i … 4 i + 3: a register each
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    F eights[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const int m = 4 * i + 2 * j;
      const F a = v[m < M ? m : 0], b = v[m + 1 < M ? m + 1 : 0];
      eights[j] = Op::of({{a.q[0], a.q[1], b.q[0], b.q[1]}}, {{a.q[2], a.q[3], b.q[2], b.q[3]}});
    }
    const F a = eights[0], b = eights[1];
    fours[i] = Op::of({{a.q[0], a.q[2], b.q[0], b.q[2]}}, {{a.q[1], a.q[3], b.q[1], b.q[3]}});
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const float32x4_t a = fours[i / 2].q[i % 2 * 2], b = fours[i / 2].q[i % 2 * 2 + 1];
    low.q[i] = vcombine_f32(vget_low_f32(a), vget_low_f32(b));
    high.q[i] = vcombine_f32(vget_high_f32(a), vget_high_f32(b));
  }
  const F twos = Op::of(low, high);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    low.q[i] = low.q[i + 2] = vuzp1q_f32(twos.q[2 * i], twos.q[2 * i + 1]);
    high.q[i] = high.q[i + 2] = vuzp2q_f32(twos.q[2 * i], twos.q[2 * i + 1]);
  }
  return Op::of(low, high);
#else
  float all[16];
  for (int m = 0; m < 16; ++m) {
    if (m >= M) {
      all[m] = all[0];
      continue;
    }
    float t[16], other[16] = {0};
    f_store(t, v[m]);
    for (int width = 8; width; width /= 2) {
      memcpy(other, t + width, static_cast<size_t>(width) * 4);
      f_store(t, Op::of(f_load(t), f_load(other)));
    }
    all[m] = t[0];
  }
  return f_load(all);
#endif
}

}  // namespace

// The vocabulary of simd.h for aarch64: sixteen lanes are four registers of 128 bits.
//
// The arithmetic. An sdot multiplies sixteen codes; published rates are two a cycle on cores with
// two vector pipes (Neoverse N1, Cortex-A76: 64 operations a cycle) and four on those with four
// (Neoverse V1, Cortex-X1, Apple: 128). A unit (16 outputs × 32 of K) and row is 32 sdot, 4 int →
// float, 4 multiplies and 4 fma: 44 operations, 22 cycles on two pipes, 73 % of that rate. Added to
// it are decoding, shared by the rows of a pass, copies, and the start of each sum. What GCC 12
// makes of it, vector operations a unit and row of level dotprod:
//
//   rows of a pass     1     2     3     6   cycles a row of six on two pipes, and of the rate
//   Q4_0             103    76    68    61   31   52 %
//   Q5_0             161   106    87    76   38   42 %
//   Q8_0              84    68    62    59   30   54 %
//   Q4_K             129    92    78    69   35   46 %
//   Q6_K             194   129   107    90   45   36 %
//
// One row of Q5_0 is 81 cycles for 352 bytes, 4.3 bytes a cycle and core: from two or three such
// cores on the memory is the limit, as on x86. With six rows 75 to 98 registers of a unit go to the
// stack and 112 to 185 come back, on the pipes for memory: 32 registers hold sums of six rows and a
// little. A kernel of its own, four outputs by twelve rows at a time, would need neither, and some
// 62 operations a row for Q5_0: not written, since nobody could say whether it helps. Counts, not
// measurements: nobody has timed this file on hardware.
//
// Without dot product (level neon: Cortex-A53, A57, A72) smull, smull2, addp and sadalp stand for
// an sdot.
//
// What differs from x86 and is made the same here: the maximum of a NaN and a number (so a
// comparison and a select stand for fmax), an fma's order of operands. Not the same: sign and
// payload of a NaN that an operation makes (x86 sets the sign), and i_round of what no int32 holds.
#pragma once
#include <arm_neon.h>

namespace {

struct F {
  float32x4_t q[4];
};
struct I {
  int32x4_t q[4];
};
struct C {
  uint8x16_t q[4];
};

HR_INLINE F f_set(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
HR_INLINE F f_zero() { return f_set(0.0f); }
HR_INLINE F f_load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
HR_INLINE void f_store(float* p, F x) {
  vst1q_f32(p, x.q[0]);
  vst1q_f32(p + 4, x.q[1]);
  vst1q_f32(p + 8, x.q[2]);
  vst1q_f32(p + 12, x.q[3]);
}
HR_INLINE I i_set(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {{v, v, v, v}};
}
HR_INLINE I i_zero() { return i_set(0); }
HR_INLINE I i_load(const int32_t* p) {
  return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}};
}
HR_INLINE void i_store(int32_t* p, I x) {
  vst1q_s32(p, x.q[0]);
  vst1q_s32(p + 4, x.q[1]);
  vst1q_s32(p + 8, x.q[2]);
  vst1q_s32(p + 12, x.q[3]);
}
HR_INLINE I i_spread(const int32_t* p) {
  const int32x4_t v = vld1q_dup_s32(p);
  return {{v, v, v, v}};
}

// A function of the registers of its operands, for each of the four.
#define HR_ONE(T, name, A, expression)                                               \
  HR_INLINE T name(A x) {                                                            \
    const auto of = [](auto a) __attribute__((always_inline)) { return expression; }; \
    return {{of(x.q[0]), of(x.q[1]), of(x.q[2]), of(x.q[3])}};                       \
  }
#define HR_TWO(T, name, expression)                                                          \
  HR_INLINE T name(T x, T y) {                                                               \
    const auto of = [](auto a, auto b) __attribute__((always_inline)) { return expression; }; \
    return {{of(x.q[0], y.q[0]), of(x.q[1], y.q[1]), of(x.q[2], y.q[2]), of(x.q[3], y.q[3])}}; \
  }
#define HR_THREE(T, name, A, B, expression)                                           \
  HR_INLINE T name(A x, A y, B z) {                                                   \
    const auto of = [](auto a, auto b, auto c) __attribute__((always_inline)) {       \
      return expression;                                                              \
    };                                                                                \
    return {{of(x.q[0], y.q[0], z.q[0]), of(x.q[1], y.q[1], z.q[1]),                  \
             of(x.q[2], y.q[2], z.q[2]), of(x.q[3], y.q[3], z.q[3])}};                \
  }
HR_TWO(F, f_add, vaddq_f32(a, b))
HR_TWO(F, f_sub, vsubq_f32(a, b))
HR_TWO(F, f_mul, vmulq_f32(a, b))
HR_TWO(F, f_div, vdivq_f32(a, b))
HR_TWO(F, f_max, vbslq_f32(vcgtq_f32(a, b), a, b))
HR_TWO(F, f_min, vbslq_f32(vcltq_f32(a, b), a, b))
HR_THREE(F, f_fma, F, F, vfmaq_f32(c, a, b))
HR_THREE(F, f_fnma, F, F, vfmsq_f32(c, a, b))
HR_ONE(F, f_floor, F, vrndmq_f32(a))
HR_ONE(F, f_from_i, I, vcvtq_f32_s32(a))
HR_ONE(I, i_round, F, vcvtnq_s32_f32(a))
HR_ONE(I, i_bits, F, vreinterpretq_s32_f32(a))
HR_ONE(F, f_bits, I, vreinterpretq_f32_s32(a))
HR_TWO(I, i_add, vaddq_s32(a, b))
HR_TWO(I, i_sub, vsubq_s32(a, b))
HR_TWO(I, i_and, vandq_s32(a, b))
HR_TWO(I, i_max, vmaxq_s32(a, b))
HR_THREE(F, f_where, F, F, vreinterpretq_f32_u32(
    vandq_u32(vcgeq_f32(a, b), vreinterpretq_u32_f32(c))))
HR_THREE(F, f_unless_below, F, F, vreinterpretq_f32_u32(
    vbicq_u32(vreinterpretq_u32_f32(c), vcltq_f32(a, b))))
template <int N>
HR_ONE(I, i_shl, I, vshlq_n_s32(a, N))
template <int N>
HR_ONE(I, i_shr, I, vshrq_n_s32(a, N))

HR_INLINE F f_half(const uint16_t* p) {
  const float16x8_t low = vreinterpretq_f16_u16(vld1q_u16(p));
  const float16x8_t high = vreinterpretq_f16_u16(vld1q_u16(p + 8));
  return {{vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low),
           vcvt_f32_f16(vget_low_f16(high)), vcvt_high_f32_f16(high)}};
}
HR_INLINE F f_e4m3(const uint8_t* p) {
  const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
  const uint16x8_t mask = vdupq_n_u16(0xbf80);
  const uint16x8_t a = vandq_u16(vreinterpretq_u16_s16(vshll_n_s8(vget_low_s8(x), 7)), mask);
  const uint16x8_t b = vandq_u16(vreinterpretq_u16_s16(vshll_high_n_s8(x, 7)), mask);
  const float16x8_t low = vreinterpretq_f16_u16(a), high = vreinterpretq_f16_u16(b);
  return {{vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low),
           vcvt_f32_f16(vget_low_f16(high)), vcvt_high_f32_f16(high)}};
}
HR_INLINE float f_half(uint16_t x) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))), 0);
}
HR_INLINE void f_store_half(uint16_t* p, F x) {
  const float16x8_t low = vcvt_high_f16_f32(vcvt_f16_f32(x.q[0]), x.q[1]);
  const float16x8_t high = vcvt_high_f16_f32(vcvt_f16_f32(x.q[2]), x.q[3]);
  vst1q_u16(p, vreinterpretq_u16_f16(low));
  vst1q_u16(p + 8, vreinterpretq_u16_f16(high));
}
HR_INLINE F f_bf16(const uint16_t* p) {
  const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
  return {{vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(low), 16)),
           vreinterpretq_f32_u32(vshll_high_n_u16(low, 16)),
           vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(high), 16)),
           vreinterpretq_f32_u32(vshll_high_n_u16(high, 16))}};
}
HR_INLINE uint32x4_t bf16_high(float32x4_t x) {  // in the upper half of each lane
  const uint32x4_t u = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t r = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  return vbslq_u32(vceqq_f32(x, x), r, vorrq_u32(u, vdupq_n_u32(0x400000)));
}
HR_INLINE void f_store_bf16(uint16_t* p, F x) {
  vst1q_u16(p, vshrn_high_n_u32(vshrn_n_u32(bf16_high(x.q[0]), 16), bf16_high(x.q[1]), 16));
  vst1q_u16(p + 8, vshrn_high_n_u32(vshrn_n_u32(bf16_high(x.q[2]), 16), bf16_high(x.q[3]), 16));
}
HR_INLINE uint32_t f_not_below(F x, F least) {
  const uint16x8_t low = vcombine_u16(vmovn_u32(vcgeq_f32(x.q[0], least.q[0])),
                                      vmovn_u32(vcgeq_f32(x.q[1], least.q[1])));
  const uint16x8_t high = vcombine_u16(vmovn_u32(vcgeq_f32(x.q[2], least.q[2])),
                                       vmovn_u32(vcgeq_f32(x.q[3], least.q[3])));
  const uint8x16_t all = vcombine_u8(vmovn_u16(low), vmovn_u16(high));
  const uint8x8_t bit = vcreate_u8(0x8040201008040201ull);
  return static_cast<uint32_t>(vaddv_u8(vand_u8(vget_low_u8(all), bit))) |
         static_cast<uint32_t>(vaddv_u8(vand_u8(vget_high_u8(all), bit))) << 8;
}
HR_INLINE I i_u8(const uint8_t* p) {
  const uint8x16_t v = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(v)), high = vmovl_high_u8(v);
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))),
           vreinterpretq_s32_u32(vmovl_high_u16(low)),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
           vreinterpretq_s32_u32(vmovl_high_u16(high))}};
}
HR_INLINE I i_s8(const int8_t* p) {
  const int8x16_t v = vld1q_s8(p);
  const int16x8_t low = vmovl_s8(vget_low_s8(v)), high = vmovl_high_s8(v);
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)),
           vmovl_high_s16(high)}};
}
HR_INLINE void i_store_s8(int8_t* p, I x) {
  const int16x8_t low = vmovn_high_s32(vmovn_s32(x.q[0]), x.q[1]);
  const int16x8_t high = vmovn_high_s32(vmovn_s32(x.q[2]), x.q[3]);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(low), high));
}
HR_INLINE int32_t i_highest(I x) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.q[0], x.q[1]), vmaxq_s32(x.q[2], x.q[3])));
}
HR_INLINE int32_t i_sum(I x) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(x.q[0], x.q[1]), vaddq_s32(x.q[2], x.q[3])));
}

HR_INLINE C c_load(const uint8_t* p) {
  return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
HR_INLINE C c_set(uint8_t x) {
  const uint8x16_t v = vdupq_n_u8(x);
  return {{v, v, v, v}};
}
HR_TWO(C, c_and, vandq_u8(a, b))
HR_TWO(C, c_or, vorrq_u8(a, b))
HR_THREE(C, c_select, C, C, vbslq_u8(a, b, c))
HR_INLINE C c_find(const uint8_t* table, C at) {
  const uint8x16_t bytes = vld1q_u8(table);
  return {{vqtbl1q_u8(bytes, at.q[0]), vqtbl1q_u8(bytes, at.q[1]), vqtbl1q_u8(bytes, at.q[2]),
           vqtbl1q_u8(bytes, at.q[3])}};
}
template <int N>
HR_INLINE C c_shift(C x) {  // by bytes: what would cross is dropped, and the caller masks it anyway
  const auto of = [](uint8x16_t a) __attribute__((always_inline)) {
    if constexpr (N > 0) return vshlq_n_u8(a, N);
    if constexpr (N < 0) return vshrq_n_u8(a, -N);
    return a;
  };
  return {{of(x.q[0]), of(x.q[1]), of(x.q[2]), of(x.q[3])}};
}
#undef HR_ONE
#undef HR_TWO
#undef HR_THREE

// Signed times signed: codes of seven bits as they are, those of eight with their highest bit
// turned. Step S's four activations are lane S % 4 of a register: no broadcast.
constexpr bool kSigned8 = true, kOneDot = HR_LEVEL >= 1;
HR_INLINE int32x4_t dot_quad(int32x4_t acc, int8x16_t w, int8x16_t a) {
#if HR_LEVEL >= 1
  return vdotq_s32(acc, w, a);
#else  // 128 · 127 twice is below 2^15
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a)), high = vmull_high_s8(w, a);
  return vpadalq_s16(acc, vpaddq_s16(low, high));
#endif
}
HR_INLINE I dot7(I acc, C w, int32_t a4) {
  const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(a4));
  const auto of = [a](int32x4_t sum, uint8x16_t v) __attribute__((always_inline)) {
    return dot_quad(sum, vreinterpretq_s8_u8(v), a);
  };
  return {{of(acc.q[0], w.q[0]), of(acc.q[1], w.q[1]), of(acc.q[2], w.q[2]),
           of(acc.q[3], w.q[3])}};
}
template <bool kEight, int S>
HR_INLINE I dot_step(I acc, C w, const int8_t* codes) {
  const int8x16_t all = vld1q_s8(codes + S / 4 * 16);  // steps 4 ⌊S / 4⌋ …, the same register
  const auto of = [all](int32x4_t sum, uint8x16_t v) __attribute__((always_inline)) {
    if constexpr (kEight) v = veorq_u8(v, vdupq_n_u8(0x80));
    const int8x16_t code = vreinterpretq_s8_u8(v);
#if HR_LEVEL >= 1
    return vdotq_laneq_s32(sum, code, all, S % 4);
#else
    return dot_quad(sum, code,
                    vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(all), S % 4)));
#endif
  };
  return {{of(acc.q[0], w.q[0]), of(acc.q[1], w.q[1]), of(acc.q[2], w.q[2]),
           of(acc.q[3], w.q[3])}};
}

}  // namespace

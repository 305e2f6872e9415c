// Activations, sixteen numbers at a time: built from exp, so the same bits at every level.
#pragma once
#include "records.h"
#include "simd.h"

namespace {

// tanh(x) = 1 − 2 / (exp(2x) + 1), safe for any x: the exponent is clamped where it saturates.
HR_INLINE F f_tanh(F x) {
  F y = f_max(f_set(-20.0f), f_min(f_set(20.0f), x));
  F e = f_exp(f_add(y, y));
  return f_sub(f_set(1.0f), f_div(f_set(2.0f), f_add(e, f_set(1.0f))));
}

// erf by Abramowitz and Stegun 7.1.26 is too coarse (1.5e-7 absolute on a value near 1 is fine,
// but the gelu multiplies it by x): absolute error 1.5e-7 · |x| is still below float32's own at
// |x| ≥ 1, and near zero 1 + erf is near 1. So it serves.
HR_INLINE F f_erf(F x) {
  I sign = i_and(i_bits(x), i_set(static_cast<int32_t>(0x80000000u)));
  F a = f_bits(i_and(i_bits(x), i_set(0x7fffffff)));
  F t = f_div(f_set(1.0f), f_fma(f_set(0.3275911f), a, f_set(1.0f)));
  F p = f_set(1.061405429f);
  p = f_fma(p, t, f_set(-1.453152027f));
  p = f_fma(p, t, f_set(1.421413741f));
  p = f_fma(p, t, f_set(-0.284496736f));
  p = f_fma(p, t, f_set(0.254829592f));
  F e = f_exp(f_sub(f_zero(), f_mul(a, a)));
  F y = f_fnma(f_mul(p, t), e, f_set(1.0f));
  // y is in [0, 1], so its sign bit is free to be set.
  return f_bits(i_add(i_bits(y), sign));
}

// log(1 + eˣ) = max(x, 0) + log1p(e^−|x|); log1p(y) = 2 atanh(y / (2 + y)), whose argument is at
// most a third: the series to the fifteenth power is good to 2e-9.
HR_INLINE F f_softplus(F x) {
  const F size = f_bits(i_and(i_bits(x), i_set(0x7fffffff)));
  const F y = f_exp(f_sub(f_zero(), size));
  const F s = f_div(y, f_add(y, f_set(2.0f))), t = f_mul(s, s);
  F p = f_set(1.0f / 15);
  for (int power = 13; power > 0; power -= 2) p = f_fma(p, t, f_set(1.0f / static_cast<float>(power)));
  return f_add(f_max(f_zero(), x), f_mul(f_add(s, s), p));
}

template <int kActivation>
HR_INLINE F activate(F x) {
  if constexpr (kActivation == HR_SILU) {
    // Below −80 the true value is under 1e-33: clamping the exponent keeps exp finite.
    F e = f_exp(f_min(f_set(80.0f), f_sub(f_zero(), x)));
    return f_div(x, f_add(e, f_set(1.0f)));
  }
  if constexpr (kActivation == HR_GELU_TANH) {
    // x / 2 · (1 + tanh u) = x · sigmoid(2u): no cancellation where tanh is near −1.
    F cube = f_mul(f_mul(x, x), x);
    F inner = f_mul(f_fma(cube, f_set(0.044715f), x), f_set(-2.0f * 0.7978845608028654f));
    F e = f_exp(f_min(f_set(80.0f), inner));
    return f_div(x, f_add(e, f_set(1.0f)));
  }
  if constexpr (kActivation == HR_TANH) return f_tanh(x);
  if constexpr (kActivation == HR_RELU2) {
    F above = f_max(f_zero(), x);  // In this order a NaN stays one.
    return f_mul(above, above);
  }
  if constexpr (kActivation == HR_RELU) return f_max(f_zero(), x);
  if constexpr (kActivation == HR_IDENTITY) return x;
  if constexpr (kActivation == HR_SIGMOID) {
    F e = f_exp(f_min(f_set(80.0f), f_sub(f_zero(), x)));
    return f_div(f_set(1.0f), f_add(e, f_set(1.0f)));
  }
  F half = f_mul(x, f_set(0.5f));
  return f_fma(half, f_erf(f_mul(x, f_set(0.7071067811865476f))), half);
}

// The same by a number, for who is not compiled once for each of them.
HR_INLINE F activate(int32_t activation, F x) {
  switch (activation) {
    case HR_SILU: return activate<HR_SILU>(x);
    case HR_GELU_TANH: return activate<HR_GELU_TANH>(x);
    case HR_TANH: return activate<HR_TANH>(x);
    case HR_RELU2: return activate<HR_RELU2>(x);
    case HR_RELU: return activate<HR_RELU>(x);
    default: return activate<HR_GELU>(x);
  }
}

}  // namespace

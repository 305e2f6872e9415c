// Operators that work row by row: quantise, norm, gate, sums.
//
// All of them are bound by memory and small beside the products: a row of D floats is read once
// or twice and written once. What they save is passes: norm and gate leave their result quantised,
// so that the product reads a quarter of the bytes and no pass of its own quantises.
//
// Quantisation: per row and 32 of K, scale = max|x| / 127, code = round to nearest even. A group
// whose maximum is below 1e-30 (denormals, zeros) is zero. A group with an infinity or a NaN
// gets the scale NaN: the whole row of the product becomes NaN, as it would in floating point.
#pragma once
#include "fold.h"
#include "work.h"

namespace {

HR_INLINE F f_tail(const float* p, int64_t left) {  // lanes beyond `left` are zero
  if (left >= 16) return f_load(p);
  float t[16] = {0};
  memcpy(t, p, static_cast<size_t>(left) * 4);
  return f_load(t);
}

HR_INLINE void f_store_tail(float* p, F x, int64_t left) {
  if (left >= 16) return f_store(p, x);
  float t[16];
  f_store(t, x);
  memcpy(p, t, static_cast<size_t>(left) * 4);
}

HR_INLINE void quantise_unit(F x0, F x1, int8_t* codes, HrUnit* unit) {
  I mask = i_set(0x7fffffff);
  // Absolute values order as integers; NaN and infinity come out on top.
  I top = i_max(i_and(i_bits(x0), mask), i_and(i_bits(x1), mask));
  const int32_t bits = i_highest(top);
  float highest;
  memcpy(&highest, &bits, 4);
  if (bits >= 0x7f800000 || highest < 1e-30f) {
    const float nan = __builtin_nanf("");
    i_store_s8(codes, i_zero());
    i_store_s8(codes + 16, i_zero());
    *unit = bits >= 0x7f800000 ? HrUnit{nan, nan, 0, 0, 0, 0} : HrUnit{0, 0, 0, 0, 0, 0};
    return;
  }
  const float scale = highest / 127.0f;
  F inverse = f_set(127.0f / highest);
  I c0 = i_round(f_mul(x0, inverse)), c1 = i_round(f_mul(x1, inverse));
  i_store_s8(codes, c0);
  i_store_s8(codes + 16, c1);
  const int32_t low = i_sum(c0), high = i_sum(c1);
  const int32_t all = low + high;
  *unit = {scale, scale * static_cast<float>(all), -32 * low, -32 * high, -16 * all, -128 * all};
}

// N units, one after the other in x, each to its lane: the same bits, with what a unit has to wait
// for by itself (two folds over lanes, two divisions) done for all of them at once.
template <int N>
__attribute__((noinline)) void quantise_units(const float* x, HrLane* const* lanes) {
  const I mask = i_set(0x7fffffff);
  F top[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i)
    top[i] = f_bits(i_max(i_and(i_bits(f_load(x + 32 * i)), mask),
                          i_and(i_bits(f_load(x + 32 * i + 16)), mask)));
  const F highest = f_fold<MaxInts>(top);
  // Lanes behind N repeat others. A NaN is in neither comparison.
  const F least = f_set(1e-30f), most = f_set(3.4028234e38f);
  if ((f_not_below(highest, least) & f_not_below(most, highest)) != 0xffff) {
    for (int i = 0; i < N; ++i)
      quantise_unit(f_load(x + 32 * i), f_load(x + 32 * i + 16), lanes[i]->codes, &lanes[i]->unit);
    return;
  }
  float scale[16], inverse[16];
  f_store(scale, f_div(highest, f_set(127.0f)));
  f_store(inverse, f_div(f_set(127.0f), highest));
  F low[N], high[N];
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    const F by = f_set(inverse[i]);
    const I c0 = i_round(f_mul(f_load(x + 32 * i), by));
    const I c1 = i_round(f_mul(f_load(x + 32 * i + 16), by));
    i_store_s8(lanes[i]->codes, c0);
    i_store_s8(lanes[i]->codes + 16, c1);
    low[i] = f_bits(c0);
    high[i] = f_bits(c1);
  }
  int32_t sums[2][16];
  i_store(sums[0], i_bits(f_fold<AddInts>(low)));
  i_store(sums[1], i_bits(f_fold<AddInts>(high)));
#pragma GCC unroll 8
  for (int i = 0; i < N; ++i) {
    const int32_t all = sums[0][i] + sums[1][i];
    lanes[i]->unit = {scale[i], scale[i] * static_cast<float>(all), -32 * sums[0][i],
                      -32 * sums[1][i], -16 * all, -128 * all};
  }
}

constexpr int kUnitsAtOnce = 8;

HR_INLINE void quantise_units(const float* x, HrLane* const* lanes, int64_t count) {
  while (count) {
    const int n = count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : 1;
    switch (n) {
      case 8: quantise_units<8>(x, lanes); break;
      case 4: quantise_units<4>(x, lanes); break;
      case 2: quantise_units<2>(x, lanes); break;
      default: quantise_unit(f_load(x), f_load(x + 16), lanes[0]->codes, &lanes[0]->unit);
    }
    x += 32 * n;
    lanes += n;
    count -= n;
  }
}

// Where row `row` keeps its unit `unit`.
HR_INLINE HrLane* lane_of(const HrQuantised& q, int64_t row, int64_t unit) {
  return &q.six[row / HR_SIX * q.stride + unit].lanes[row % HR_SIX];
}

HR_INLINE void quantise_at(const HrQuantised& q, int64_t row, int64_t unit, F x0, F x1) {
  HrLane* lane = lane_of(q, row, unit);
  quantise_unit(x0, x1, lane->codes, &lane->unit);
}

HR_INLINE void quantise_row(const float* x, int64_t size, const HrQuantised& q, int64_t row,
                            int64_t unit) {
  HrLane* lane = lane_of(q, row, unit);
  for (int64_t i = 0; i < size;) {
    HrLane* lanes[kUnitsAtOnce];
    int64_t n = 0;
    for (; n < kUnitsAtOnce && i + 32 * n < size; ++n, lane += HR_SIX) lanes[n] = lane;
    quantise_units(x + i, lanes, n);
    i += 32 * n;
  }
}

void op_quantise(const HrQuantise& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.rows(op.rows), &first, &last);
  for (int64_t row = first; row < last; ++row)
    quantise_row(op.x + row * op.x_stride, op.size, op.q, row, 0);
}

// y = x / sqrt(mean(x²) + eps) · (weight + offset); mean over four chains of sixteen lanes.
void op_norm(const HrNorm& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.rows(op.rows), &first, &last);
  for (int64_t row = first; row < last; ++row) {
    const float* x = op.x + row * op.x_stride;
    F square[4] = {f_zero(), f_zero(), f_zero(), f_zero()};
    if (op.residual) {
      float* residual = op.residual + row * op.residual_stride;
      int chain = 0;
      for (int64_t i = 0; i < op.size; i += 16, chain = (chain + 1) & 3) {
        F v = f_add(f_tail(residual + i, op.size - i), f_tail(x + i, op.size - i));
        f_store_tail(residual + i, v, op.size - i);
        square[chain] = f_fma(v, v, square[chain]);
      }
      x = residual;
    } else {
      int chain = 0;
      for (int64_t i = 0; i < op.size; i += 16, chain = (chain + 1) & 3) {
        F v = f_tail(x + i, op.size - i);
        square[chain] = f_fma(v, v, square[chain]);
      }
    }
    const float total = f_sum(f_add(f_add(square[0], square[1]), f_add(square[2], square[3])));
    const float inverse =
        1.0f / __builtin_sqrtf(total / static_cast<float>(op.size) + op.eps);
    F scale = f_set(inverse), offset = f_set(op.offset);
    float* y = op.y ? op.y + row * op.y_stride : nullptr;
    if (op.q.six) {
      for (int64_t i = 0; i < op.size; i += 32 * kUnitsAtOnce) {
        const int64_t left = op.size - i, n = left < 32 * kUnitsAtOnce ? left : 32 * kUnitsAtOnce;
        float v[32 * kUnitsAtOnce];
        for (int64_t j = 0; j < n; j += 16) {
          const int64_t at = i + j;
          F to = f_mul(f_mul(f_load(x + at), scale), f_add(f_load(op.weight + at), offset));
          f_store(v + j, to);
          if (y) f_store(y + at, to);
        }
        quantise_row(v, n, op.q, row, i / 32);
      }
    } else {
      for (int64_t i = 0; i < op.size; i += 16) {
        const int64_t left = op.size - i;
        F w = f_add(f_tail(op.weight + i, left), offset);
        f_store_tail(y + i, f_mul(f_mul(f_tail(x + i, left), scale), w), left);
      }
    }
  }
}

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
  F half = f_mul(x, f_set(0.5f));
  return f_fma(half, f_erf(f_mul(x, f_set(0.7071067811865476f))), half);
}

template <int kActivation>
void gated_range(const HrGated& op, int64_t row, int64_t from, int64_t to) {
  const float* gate = op.x + row * op.x_stride;
  const float* up = gate + op.size;
  float* y = op.y ? op.y + row * op.y_stride : nullptr;
  if (op.q.six) {
    for (int64_t i = from; i < to; i += 32) {
      F v[2];
      for (int h = 0; h < 2; ++h) {
        const int64_t at = i + 16 * h;
        v[h] = f_mul(activate<kActivation>(f_load(gate + at)), f_load(up + at));
        if (y) f_store(y + at, v[h]);
      }
      quantise_at(op.q, row, i / 32, v[0], v[1]);
    }
    return;
  }
  for (int64_t i = from; i < to; i += 16) {
    const int64_t left = to - i;
    F v = f_mul(activate<kActivation>(f_tail(gate + i, left)), f_tail(up + i, left));
    f_store_tail(y + i, v, left);
  }
}

void op_gated(const HrGated& op, const hr::Work& work) {
  // Few rows: threads share the columns too, in runs of 32.
  constexpr int64_t kColumns = 512;
  const int64_t runs = (op.size + kColumns - 1) / kColumns;
  int64_t first, last;
  work.share(work.rows(op.rows) * runs, &first, &last);
  for (int64_t item = first; item < last; ++item) {
    const int64_t row = item / runs, from = item % runs * kColumns;
    const int64_t to = from + kColumns < op.size ? from + kColumns : op.size;
    switch (op.activation) {
      case HR_SILU: gated_range<HR_SILU>(op, row, from, to); break;
      case HR_GELU_TANH: gated_range<HR_GELU_TANH>(op, row, from, to); break;
      default: gated_range<HR_GELU>(op, row, from, to); break;
    }
  }
}

void op_select(const HrRowsOp& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.step->r, &first, &last);
  for (int64_t r = first; r < last; ++r)
    memcpy(op.y + r * op.y_stride, op.x + work.step->sample_rows[r] * op.x_stride,
           static_cast<size_t>(op.size) * 4);
}

void op_add(const HrRowsOp& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.rows(op.rows), &first, &last);
  for (int64_t row = first; row < last; ++row) {
    const float* x = op.x + row * op.x_stride;
    float* y = op.y + row * op.y_stride;
    for (int64_t i = 0; i < op.size; i += 16)
      f_store_tail(y + i, f_add(f_tail(y + i, op.size - i), f_tail(x + i, op.size - i)),
                   op.size - i);
  }
}

void op_softcap(const HrRowsOp& op, const hr::Work& work) {
  constexpr int64_t kColumns = 4096;
  const int64_t runs = (op.size + kColumns - 1) / kColumns;
  int64_t first, last;
  work.share(work.step->r * runs, &first, &last);
  F cap = f_set(op.softcap);
  for (int64_t item = first; item < last; ++item) {
    float* y = op.y + item / runs * op.y_stride;
    const int64_t from = item % runs * kColumns;
    const int64_t to = from + kColumns < op.size ? from + kColumns : op.size;
    for (int64_t i = from; i < to; i += 16) {
      F x = f_div(f_tail(y + i, to - i), cap);
      f_store_tail(y + i, f_mul(cap, f_tanh(x)), to - i);
    }
  }
}

}  // namespace

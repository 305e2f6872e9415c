// Operators that work row by row: quantise, norms, gate, activation, sums.
//
// All of them are bound by memory and small beside the products: a row of D floats is read once
// or twice and written once. What they save is passes: norm and gate leave their result quantised,
// so that the product reads a quarter of the bytes and no pass of its own quantises.
//
// Quantisation: per row and 32 of K, scale = max|x| / 127, code = round to nearest even. A group
// whose maximum is below 1e-30 (denormals, zeros) is zero. A group with an infinity or a NaN
// gets the scale NaN: the whole row of the product becomes NaN, as it would in floating point.
#pragma once
#include "activations.h"
#include "fold.h"
#include "tails.h"
#include "work.h"

namespace {

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
  for (int64_t row = first; row < last; ++row) {
    const float* x = op.x + row * op.x_stride;
    if (!op.order) quantise_row(x, op.size, op.q, row, 0);
    for (int64_t i = 0; op.order && i < op.size; i += HR_UNIT_K) {
      alignas(64) float unit[HR_UNIT_K];
      for (int j = 0; j < HR_UNIT_K; ++j) unit[j] = x[op.order[i + j]];
      quantise_at(op.q, row, i / HR_UNIT_K, f_load(unit), f_load(unit + 16));
    }
  }
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

// The entry of each row of N, for rows that ascend.
struct Entries {
  const int32_t* starts;
  int64_t entry = 0;
  HR_ALWAYS int64_t of(int64_t row) {
    while (row >= starts[entry + 1]) ++entry;
    return entry;
  }
};

// y = (x − mean) / sqrt(variance + eps) · weight + bias; both sums over four chains of sixteen
// lanes, the variance from the differences. Weight and bias of all rows, or of the row's entry.
void op_layer_norm(const HrLayerNorm& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.rows(op.rows), &first, &last);
  const auto total = [](const F (&chain)[4]) __attribute__((always_inline)) {
    return f_sum(f_add(f_add(chain[0], chain[1]), f_add(chain[2], chain[3])));
  };
  Entries entries{work.step->query_starts};
  const float *weight = op.weight, *bias = op.bias;
  for (int64_t row = first; row < last; ++row) {
    const float* x = op.x + row * op.x_stride;
    if (op.weight_stride) {
      const int64_t entry = entries.of(row);
      weight = op.weight + entry * op.weight_stride;
      bias = op.bias + entry * op.bias_stride;
    }
    if (op.residual) {
      float* residual = op.residual + row * op.residual_stride;
      for (int64_t i = 0; i < op.size; i += 16)
        f_store_tail(residual + i,
                     f_add(f_tail(residual + i, op.size - i), f_tail(x + i, op.size - i)),
                     op.size - i);
      x = residual;
    }
    F sum[4] = {f_zero(), f_zero(), f_zero(), f_zero()};
    F square[4] = {f_zero(), f_zero(), f_zero(), f_zero()};
    // Vectors go to the four chains in turn, all by constants, so that these stay in registers.
    for (int64_t i = 0; i < op.size; i += 64)
#pragma GCC unroll 4
      for (int chain = 0; chain < 4; ++chain)
        if (const int64_t at = i + 16 * chain; at < op.size)
          sum[chain] = f_add(sum[chain], f_tail(x + at, op.size - at));
    const float size = static_cast<float>(op.size);
    const F mean = f_set(total(sum) / size);
    for (int64_t i = 0; i < op.size; i += 64)
#pragma GCC unroll 4
      for (int chain = 0; chain < 4; ++chain)
        if (const int64_t at = i + 16 * chain; at < op.size) {
          F apart = f_sub(f_tail(x + at, op.size - at), mean);
          if (op.size - at < 16) apart = f_first(apart, op.size - at);
          square[chain] = f_fma(apart, apart, square[chain]);
        }
    const F scale = f_set(1.0f / __builtin_sqrtf(total(square) / size + op.eps));
    float* y = op.y ? op.y + row * op.y_stride : nullptr;
    for (int64_t i = 0; i < op.size; i += 32 * kUnitsAtOnce) {
      const int64_t left = op.size - i, n = left < 32 * kUnitsAtOnce ? left : 32 * kUnitsAtOnce;
      float v[32 * kUnitsAtOnce];
      for (int64_t j = 0; j < n; j += 16) {
        const int64_t at = i + j, room = op.size - at;
        F gain = f_tail(weight + at, room);
        if (op.weight_stride) gain = f_add(gain, f_set(1.0f));
        const F to = f_fma(f_mul(f_sub(f_tail(x + at, room), mean), scale), gain,
                           bias ? f_tail(bias + at, room) : f_zero());
        if (op.q.six) f_store(v + j, to);
        if (y) f_store_tail(y + at, to, room);
      }
      if (op.q.six) quantise_row(v, n, op.q, row, i / 32);
    }
  }
}

// kUp: times what stands behind the gates; else the activation alone.
template <int kActivation, bool kUp>
void gated_range(const HrGated& op, int64_t row, int64_t from, int64_t to) {
  const float* gate = op.x + row * op.x_stride;
  const float* up = gate + op.size;
  float* y = op.y ? op.y + row * op.y_stride : nullptr;
  if (op.q.six) {
    for (int64_t i = from; i < to; i += 32) {
      F v[2];
      for (int h = 0; h < 2; ++h) {
        const int64_t at = i + 16 * h;
        v[h] = activate<kActivation>(f_load(gate + at));
        if constexpr (kUp) v[h] = f_mul(v[h], f_load(up + at));
        if (y) f_store(y + at, v[h]);
      }
      quantise_at(op.q, row, i / 32, v[0], v[1]);
    }
    return;
  }
  for (int64_t i = from; i < to; i += 16) {
    const int64_t left = to - i;
    F v = activate<kActivation>(f_tail(gate + i, left));
    if constexpr (kUp) v = f_mul(v, f_tail(up + i, left));
    f_store_tail(y + i, v, left);
  }
}

template <bool kUp>
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
      case HR_SILU: gated_range<HR_SILU, kUp>(op, row, from, to); break;
      case HR_GELU_TANH: gated_range<HR_GELU_TANH, kUp>(op, row, from, to); break;
      case HR_TANH: gated_range<HR_TANH, kUp>(op, row, from, to); break;
      case HR_RELU2: gated_range<HR_RELU2, kUp>(op, row, from, to); break;
      case HR_RELU: gated_range<HR_RELU, kUp>(op, row, from, to); break;
      default: gated_range<HR_GELU, kUp>(op, row, from, to); break;
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
  const F factor = f_set(op.factor);
  for (int64_t row = first; row < last; ++row) {
    const float* x = op.x + row * op.x_stride;
    float* y = op.y + row * op.y_stride;
    for (int64_t i = 0; i < op.size; i += 16)
      f_store_tail(y + i, f_fma(factor, f_tail(x + i, op.size - i), f_tail(y + i, op.size - i)),
                   op.size - i);
  }
}

void op_modulate(const HrModulate& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.step->n, &first, &last);
  Entries entries{work.step->query_starts};
  for (int64_t row = first; row < last; ++row) {
    const float* x = op.x + row * op.x_stride;
    const float* factors = op.factors + entries.of(row) * op.factors_stride;
    float* y = op.y + row * op.y_stride;
    for (int64_t i = 0; i < op.size; i += 16) {
      const int64_t left = op.size - i;
      const F factor = f_tail(factors + i, left), old = f_tail(y + i, left);
      f_store_tail(y + i, op.x ? f_fma(factor, f_tail(x + i, left), old) : f_add(old, factor), left);
    }
  }
}

// Logits: y = f · tanh(y / f), or f · y.
template <bool kCap>
void op_logits(const HrRowsOp& op, const hr::Work& work) {
  constexpr int64_t kColumns = 4096;
  const int64_t runs = (op.size + kColumns - 1) / kColumns;
  int64_t first, last;
  work.share(work.rows(op.rows) * runs, &first, &last);
  const F factor = f_set(op.factor);
  for (int64_t item = first; item < last; ++item) {
    float* y = op.y + item / runs * op.y_stride;
    const int64_t from = item % runs * kColumns;
    const int64_t to = from + kColumns < op.size ? from + kColumns : op.size;
    for (int64_t i = from; i < to; i += 16) {
      F x = f_tail(y + i, to - i);
      if constexpr (kCap) x = f_tanh(f_div(x, factor));
      f_store_tail(y + i, f_mul(factor, x), to - i);
    }
  }
}

}  // namespace

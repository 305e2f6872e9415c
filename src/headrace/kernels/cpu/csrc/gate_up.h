// act(x · gateᵀ) · (x · upᵀ), quantised: the first half of a feed-forward in one pass.
//
// 32 outputs of gate and the same 32 of up are exactly one unit of what the next product reads:
// they are summed side by side in scratch, put through the activation and left as int8. The fp32
// matrix [rows, 2 · I] never exists: at 512 rows of the default model 20 MB written and read
// again per layer. The float operations and their order are those of the separate kernels.
#pragma once
#include "products.h"
#include "rows.h"

namespace {

// sums[32 · row + 16 · p + lane] of one unit of 32 outputs, rows [row0, end).
template <class Q>
void unit_sums(const HrQuantised& x, const HrPart& part, int64_t row0, int64_t end, int64_t unit,
               uint8_t* scratch, float* sums) {
  auto* decoded = reinterpret_cast<Decoded*>(scratch);
  if (end <= kRows) {
    switch (end) {
      case 1: return vector_pair<Q, 1>(x, part, 2 * unit, sums);
      case 2: return vector_pair<Q, 2>(x, part, 2 * unit, sums);
      case 3: return vector_pair<Q, 3>(x, part, 2 * unit, sums);
#if HR_LEVEL >= 3
      case 4: return vector_pair<Q, 4>(x, part, 2 * unit, sums);
      case 5: return vector_pair<Q, 5>(x, part, 2 * unit, sums);
      case 6: return vector_pair<Q, 6>(x, part, 2 * unit, sums);
#endif
    }
  }
  if (end <= kVectorRows) {
    vector_sums<Q>(x, part, 2 * unit, 2, end, sums, 32);
    return;
  }
  if constexpr (kPanels == 2) {
    matrix_sums<Q, 2>(x, part, row0, end, 2 * unit, decoded, sums);
  } else {
    auto* half = reinterpret_cast<float*>(scratch + sizeof(Decoded) * kPanels);
    for (int p = 0; p < 2; ++p) {
      matrix_sums<Q, 1>(x, part, row0, end, 2 * unit + p, decoded, half);
      for (int64_t m = 0; m < end - row0; ++m)
        f_store(sums + 32 * m + 16 * p, f_load(half + 16 * m));
    }
  }
}

void unit_sums_any(const HrQuantised& x, const HrPart& part, int64_t row0, int64_t end,
                   int64_t unit, uint8_t* scratch, float* sums) {
  switch (part.kind) {
    case HR_Q4_0: return unit_sums<Q4_0>(x, part, row0, end, unit, scratch, sums);
    case HR_Q4_1: return unit_sums<Q4_1>(x, part, row0, end, unit, scratch, sums);
    case HR_Q5_0: return unit_sums<Q5_0>(x, part, row0, end, unit, scratch, sums);
    case HR_Q5_1: return unit_sums<Q5_1>(x, part, row0, end, unit, scratch, sums);
    case HR_Q8_0: return unit_sums<Q8_0>(x, part, row0, end, unit, scratch, sums);
    case HR_Q4_K: return unit_sums<Q4_K>(x, part, row0, end, unit, scratch, sums);
    case HR_Q5_K: return unit_sums<Q5_K>(x, part, row0, end, unit, scratch, sums);
    case HR_Q6_K: return unit_sums<Q6_K>(x, part, row0, end, unit, scratch, sums);
  }
}

template <int kActivation>
void gate_rows(const HrGateUp& op, int64_t row0, int64_t end, int64_t unit, const float* gate,
               const float* up) {
  for (int64_t row = row0; row < end; ++row, gate += 32, up += 32) {
    F first = f_mul(activate<kActivation>(f_load(gate)), f_load(up));
    F second = f_mul(activate<kActivation>(f_load(gate + 16)), f_load(up + 16));
    quantise_at(op.q, row, unit, first, second);
  }
}

void op_gate_up(const HrGateUp& op, const hr::Work& work) {
  const int64_t rows = work.step->n, units = op.gate.out / 32, slab = slab_of(rows);
  auto* gate = reinterpret_cast<float*>(work.scratch + sizeof(Decoded) * kPanels) + kSums;
  float* up = gate + 32 * kSlab;
  int victim = 0;
  int64_t unit;
  while (work.next_in_line(units, &victim, &unit)) {
    for (int64_t row0 = 0; row0 < rows; row0 += slab) {
      const int64_t end = row0 + slab < rows ? row0 + slab : rows;
      unit_sums_any(op.x, op.gate, row0, end, unit, work.scratch, gate);
      unit_sums_any(op.x, op.up, row0, end, unit, work.scratch, up);
      switch (op.activation) {
        case HR_SILU: gate_rows<HR_SILU>(op, row0, end, unit, gate, up); break;
        case HR_GELU_TANH: gate_rows<HR_GELU_TANH>(op, row0, end, unit, gate, up); break;
        default: gate_rows<HR_GELU>(op, row0, end, unit, gate, up); break;
      }
    }
  }
}

}  // namespace

// act(x · gateᵀ) · (x · upᵀ), quantised: the first half of a feed-forward in one pass.
//
// 32 outputs of gate and the same 32 of up are exactly one unit of what the next product reads:
// they are summed side by side, put through the activation and left as int8. The fp32 matrix
// [rows, 2 · I] never exists: at 512 rows of the default model 20 MB written and read again per
// layer. The float operations and their order are those of the separate kernels.
#pragma once
#include "products.h"
#include "rows.h"

namespace {

// sums[kSums · i + 16 · p + lane] of one unit of 32 outputs, rows [row, row + m).
void unit_sums(const HrQuantised& x, const HrPart& part, int64_t unit, int64_t row, int m,
               int pass, int passes, float* sums) {
#define HR_EACH(Q) \
  case HR_##Q: return hr::HR_NAME::unit_##Q(x, part, unit, row, m, pass, passes, sums);
  switch (part.kind) {
    HR_CODED_KINDS(HR_EACH)
  }
#undef HR_EACH
}

#if HR_LEVEL >= 4
constexpr int64_t kUnitsRun = 8;

// sums[32 · i + 16 · p + lane] of rows [row, row + m), kManyRows at most.
void many_sums(const HrQuantised& x, const HrPart& part, int64_t unit, int64_t row, int m,
               float* sums) {
#define HR_EACH(Q) \
  case HR_##Q: return hr::HR_NAME::units_##Q(x, part, unit, row, m, sums);
  switch (part.kind) {
    HR_CODED_KINDS(HR_EACH)
  }
#undef HR_EACH
}
#endif

template <int kActivation>
void gate_rows(const HrGateUp& op, int64_t row, int m, int64_t unit, const float* gate,
               const float* up, int64_t stride) {
  alignas(64) float v[32 * kUnitsAtOnce];
  for (int i = 0, n; i < m; i += n) {
    HrLane* lanes[kUnitsAtOnce];
    n = m - i < kUnitsAtOnce ? m - i : kUnitsAtOnce;
    for (int j = 0; j < n; ++j, gate += stride, up += stride) {
      for (int h = 0; h < 32; h += 16)
        f_store(v + 32 * j + h, f_mul(activate<kActivation>(f_load(gate + h)), f_load(up + h)));
      lanes[j] = lane_of(op.q, row + i + j, unit);
    }
    quantise_units(v, lanes, n);
  }
}

void gate_rows(const HrGateUp& op, int64_t row, int m, int64_t unit, const float* gate,
               const float* up, int64_t stride) {
  switch (op.activation) {
    case HR_SILU: return gate_rows<HR_SILU>(op, row, m, unit, gate, up, stride);
    case HR_GELU_TANH: return gate_rows<HR_GELU_TANH>(op, row, m, unit, gate, up, stride);
    default: return gate_rows<HR_GELU>(op, row, m, unit, gate, up, stride);
  }
}

#if HR_LEVEL >= 4
// Units of an item find the rows' codes in L2, which of thousands of rows L3 gives too slowly.
void many_gate_up(const HrGateUp& op, int64_t rows, const hr::Work& work) {
  const int64_t units = op.gate.out / 32, fair = units / (4 * work.threads);
  const int64_t run = fair < 1 ? 1 : fair > kUnitsRun ? kUnitsRun : fair;
  alignas(64) float gate[kManyRows * HR_UNIT_K], up[kManyRows * HR_UNIT_K];
  int victim = 0;
  int64_t item;
  while (work.next_in_line((units + run - 1) / run, &victim, &item)) {
    const int64_t last = (item + 1) * run < units ? (item + 1) * run : units;
    for (int64_t row = 0; row < rows; row += kManyRows) {
      const int m = static_cast<int>(rows - row < kManyRows ? rows - row : kManyRows);
      for (int64_t unit = item * run; unit < last; ++unit) {
        many_sums(op.x, op.gate, unit, row, m, gate);
        many_sums(op.x, op.up, unit, row, m, up);
        gate_rows(op, row, m, unit, gate, up, HR_UNIT_K);
      }
    }
  }
}
#endif

void op_gate_up(const HrGateUp& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.rows), units = op.gate.out / 32;
  if (rows == 0) return;
#if HR_LEVEL >= 4
  if (rows > hr::fetching.coded) return many_gate_up(op, rows, work);
#endif
  const int passes = passes_of(rows);
  alignas(64) float gate[kSums * kWide], up[kSums * kWide];
  int victim = 0;
  int64_t unit;
  while (work.next_in_line(units, &victim, &unit)) {
    int64_t row = 0;
    for (int pass = 0; pass < passes; ++pass) {
      const int m = rows_of_pass(rows - row);
      unit_sums(op.x, op.gate, unit, row, m, pass, passes, gate);
      unit_sums(op.x, op.up, unit, row, m, pass, passes, up);
      gate_rows(op, row, m, unit, gate, up, kSums);
      row += m;
    }
  }
}

}  // namespace

// The table of the AMX level: products of many rows through tiles, all else as at level bf16.
// Included by kernels_amx.cpp and, for tests, by kernels_amx_emulated.cpp.
#pragma once
#include "amx_products.h"
#include "levels.h"

namespace {

void run(const HrRecord& record, const hr::Work& work) {
  if (record.code == HR_OP_LINEAR) {
    const auto& op = *static_cast<const HrLinear*>(record.op);
    const int64_t rows = work.rows(op.rows);
    if (op.x.six && rows >= kTileRows) return tiled_linear(op, rows, work);
  }
  if (record.code == HR_OP_GATE_UP) {
    const auto& op = *static_cast<const HrGateUp*>(record.op);
    const int64_t rows = work.rows(op.rows);
    if (rows >= kTileRows) return tiled_gate_up(op, rows, work);
  }
  hr::k_bf16.run(record, work);
}

hr::Room scratch_of(const HrRecord& record, const HrStep& step, int threads) {
  if (record.code == HR_OP_LINEAR)
    return {scratch_of_linear(*static_cast<const HrLinear*>(record.op)), 0};
  if (record.code == HR_OP_GATE_UP)
    return {tile_scratch(4, static_cast<const HrGateUp*>(record.op)->gate.in), 0};
  return hr::k_bf16.scratch(record, step, threads);
}

// Both ceilings are asked of the vector units, as at the other levels.
double integer_peak(int64_t iterations) { return hr::k_bf16.integer_peak(iterations); }

uint64_t read_stream(const uint8_t* data, int64_t bytes) {
  return hr::k_bf16.read_stream(data, bytes);
}

}  // namespace

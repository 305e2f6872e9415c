// The table of the AMX level: dense products of bf16 through tiles, all else as at level bf16.
// Included by kernels_amx.cpp and, for tests, by kernels_amx_emulated.cpp.
#pragma once
#include "amx_dense.h"
#include "levels.h"

namespace {

template <int kPieces>
void run(const HrRecord& record, const hr::Work& work) {
  if (record.code == HR_OP_LINEAR) {
    const auto& op = *static_cast<const HrLinear*>(record.op);
    if (any_in_tiles(op)) return tiled_linear<kPieces>(op, work);
  }
  if (record.code == HR_OP_BEST) {
    const auto& op = *static_cast<const HrHead*>(record.op);
    if (any_in_tiles(op.linear))
      return best_by(op, work, [&](const HrLinear& linear) { tiled_linear<kPieces>(linear, work); });
  }
  hr::k_bf16.run(record, work);
}

int64_t room_of(const HrLinear& op) {
  int64_t most = 0;
  for (int32_t i = 0; i < op.count; ++i)
    if (op.dense && in_tiles(op.parts[i]) && tile_room(op.parts[i].in) > most)
      most = tile_room(op.parts[i].in);
  return most;
}

hr::Room scratch_of(const HrRecord& record, const HrStep& step, int threads) {
  hr::Room room = hr::k_bf16.scratch(record, step, threads);
  int64_t tiles = 0;
  if (record.code == HR_OP_LINEAR) tiles = room_of(*static_cast<const HrLinear*>(record.op));
  if (record.code == HR_OP_BEST) tiles = room_of(static_cast<const HrHead*>(record.op)->linear);
  if (tiles > room.each) room.each = tiles;
  return room;
}

// Both ceilings are asked of the vector units, as at the other levels.
double integer_peak(int64_t iterations) { return hr::k_bf16.integer_peak(iterations); }

uint64_t read_stream(const uint8_t* data, int64_t bytes) {
  return hr::k_bf16.read_stream(data, bytes);
}

}  // namespace

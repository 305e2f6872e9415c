// Tiles: the five functions over which the AMX kernels are written, and the shapes of their tiles.
//
// Palette 1 has eight tiles of up to 16 rows × 64 bytes:
//
//   tile    rows × bytes   holds
//   0 … 3      16 × 64     C: fp32 sums, 16 rows of activations × 16 outputs
//   4, 5       16 × 64     A: bf16 activations, a block of K (32)
//   6, 7       16 × 64     B: bf16 weights, two of K by two: [k / 2][output][k % 2]
//
// amx_device.h has the functions as instructions, amx_emulated.h in plain C++ with the same
// refusals, for machines that have no tiles (chosen by HR_TILES_EMULATED at compile time).
#pragma once
#include <cstdint>

#include "simd.h"

namespace {

constexpr int kTileRows = 16;

struct TileConfig {  // what LDTILECFG reads
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64, "the layout of the architecture");

alignas(64) constexpr TileConfig kTileConfig{
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

}  // namespace

#if defined(HR_TILES_EMULATED)
#include "amx_emulated.h"
#else
#include "amx_device.h"
#endif

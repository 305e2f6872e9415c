// Tiles: the five functions over which the AMX kernels are written, and the shapes of their tiles.
//
// Palette 1 has eight tiles of up to 16 rows × 64 bytes. One configuration serves every kernel:
//
//   tile    rows × bytes   holds
//   0, 1       16 × 64     C: int32 sums, 16 rows of activations × 16 outputs
//   2, 3       16 × 32     A: int8 activations of a unit (32 of K)
//   4, 5        8 × 64     B: int8 weights of a unit, step by step as in the panel (layout.h)
//   6          16 × 16     A of half a unit (Q6_K has a scale per 16 of K)
//   7           4 × 64     B of half a unit
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
    1, 0, {}, {64, 64, 32, 32, 64, 64, 16, 64}, {16, 16, 16, 16, 8, 8, 16, 4}};

}  // namespace

#if defined(HR_TILES_EMULATED)
#include "amx_emulated.h"
#else
#include "amx_device.h"
#endif

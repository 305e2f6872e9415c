// The tile functions in plain C++, for tests where no CPU has tiles: never in a build for use.
//
// What the architecture refuses (Intel's manual, volume 2: LDTILECFG, TILELOADD, TDPBF16PS …) ends
// the process here: a configuration that is none, tiles without one, shapes that do not fit.
#pragma once
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct EmulatedTiles {  // the tile registers of one thread
  TileConfig config;
  uint8_t data[8][16][64];
};

inline EmulatedTiles& tiles() {
  static thread_local EmulatedTiles state{};
  return state;
}

inline void tiles_demand(bool holds, const char* what) {
  if (holds) return;
  fprintf(stderr, "emulated tiles: %s\n", what);
  abort();
}

inline void tiles_begin(const TileConfig& config) {
  tiles_demand(config.palette == 1, "the palette is 1");
  tiles_demand(config.start_row == 0, "the first row is 0");
  for (uint8_t byte : config.reserved) tiles_demand(byte == 0, "reserved bytes are zero");
  for (int t = 0; t < 16; ++t) {
    tiles_demand(config.rows[t] <= 16 && config.row_bytes[t] <= 64, "a tile is 16 × 64 at most");
    tiles_demand((config.rows[t] == 0) == (config.row_bytes[t] == 0), "rows and bytes, or neither");
    tiles_demand(t < 8 || config.rows[t] == 0, "there are eight tiles");
  }
  tiles().config = config;
  memset(tiles().data, 0, sizeof tiles().data);
}

inline void tiles_end() { memset(&tiles(), 0, sizeof tiles()); }

template <int T>
inline void tile_known() {
  static_assert(T >= 0 && T < 8, "a tile's number");
  tiles_demand(tiles().config.palette == 1, "tiles are configured before use");
  tiles_demand(tiles().config.rows[T] > 0, "this tile is configured");
}

template <int T>
inline void tile_zero() {
  tile_known<T>();
  memset(tiles().data[T], 0, sizeof tiles().data[T]);
}

template <int T>
inline void tile_load(const void* base, int64_t stride) {
  tile_zero<T>();
  const auto* from = static_cast<const uint8_t*>(base);
  for (int r = 0; r < tiles().config.rows[T]; ++r)
    memcpy(tiles().data[T][r], from + r * stride, tiles().config.row_bytes[T]);
}

template <int T>
inline void tile_store(void* base, int64_t stride) {
  tile_known<T>();
  auto* to = static_cast<uint8_t*>(base);
  for (int r = 0; r < tiles().config.rows[T]; ++r)
    memcpy(to + r * stride, tiles().data[T][r], tiles().config.row_bytes[T]);
}

// Numbers below the least normal one count as none and become none.
inline float tile_flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x; }

inline float tile_bf16(const uint8_t* at) {
  uint16_t half;
  memcpy(&half, at, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return tile_flushed(x);
}

template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
  static_assert(kC != kA && kA != kB && kC != kB, "three tiles");
  tile_known<kC>();
  tile_known<kA>();
  tile_known<kB>();
  const TileConfig& config = tiles().config;
  const int rows = config.rows[kC], outputs = config.row_bytes[kC] / 4;
  const int steps = config.row_bytes[kA] / 4;
  tiles_demand(config.row_bytes[kC] % 4 == 0 && config.row_bytes[kA] % 4 == 0 &&
                   config.row_bytes[kB] % 4 == 0, "rows are whole dwords");
  tiles_demand(config.rows[kA] == rows, "A has the rows of C");
  tiles_demand(config.rows[kB] == steps, "B has a row for each dword of a row of A");
  tiles_demand(config.row_bytes[kB] == config.row_bytes[kC], "B is as wide as C");
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < outputs; ++n) {
      float chains[2] = {0, 0}, sum;
      for (int k = 0; k < steps; ++k)
        for (int i = 0; i < 2; ++i)
          chains[i] = tile_flushed(std::fma(tile_bf16(tiles().data[kA][m] + 4 * k + 2 * i),
                                            tile_bf16(tiles().data[kB][k] + 4 * n + 2 * i), chains[i]));
      memcpy(&sum, tiles().data[kC][m] + 4 * n, 4);
      sum = tile_flushed(tile_flushed(sum) + tile_flushed(chains[0] + chains[1]));
      memcpy(tiles().data[kC][m] + 4 * n, &sum, 4);
    }
  }
  // The architecture zeroes what of C lies beyond its rows; they never become anything else here.
}

}  // namespace

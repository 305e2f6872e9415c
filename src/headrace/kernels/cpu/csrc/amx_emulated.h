// The tile functions in plain C++, for tests where no CPU has tiles: never in a build for use.
//
// What the architecture refuses (Intel's manual, volume 2: LDTILECFG, TILELOADD, TDPBSSD …) ends
// the process here: a configuration that is none, tiles without one, shapes that do not fit.
#pragma once
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

template <int kC, int kA, int kB>
inline void tile_dot() {
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
    for (int k = 0; k < steps; ++k) {
      for (int n = 0; n < outputs; ++n) {
        int32_t sum;
        memcpy(&sum, tiles().data[kC][m] + 4 * n, 4);
        for (int i = 0; i < 4; ++i) {
          const auto a = static_cast<int8_t>(tiles().data[kA][m][4 * k + i]);
          const auto b = static_cast<int8_t>(tiles().data[kB][k][4 * n + i]);
          sum += a * b;
        }
        memcpy(tiles().data[kC][m] + 4 * n, &sum, 4);
      }
    }
  }
  // The architecture zeroes what of C lies beyond its rows; they never become anything else here.
}

}  // namespace

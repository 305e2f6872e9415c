// A tile of KV in codes: its cells, mostly where they lie, and beside them, in work space, what each
// position's scales come to and the biases that its keys are kept without.
//
// Weights meet V as whole numbers of fifteen bits, so the scales of V go into them: a position's
// rate is what a weight of one is there, and the largest of the tile's is kWeightCodes. Positions
// that a row does not see must not be in that: rows that do not see all of a tile have rates of
// their own (code_rows.h).
#pragma once
#include "tiles.h"

namespace {

struct Codes {  // four a step, whole numbers
  static constexpr int wide = 4;
  using Cell = uint8_t;
  using Row = int16_t;
};

struct Turned {  // a pair of biases at a tile's first position, which 64 positions turn further
  float x, y;
  int32_t low, high;  // which numbers of the head they are; high is −1 where nothing is rotated
};

template <>
struct Tile<Codes> {
  const uint8_t* k[kVectors];  // sixteen positions each; step s at k[i] + s · k_step
  const uint8_t* v[kVectors];  // sixteen positions each: [4][E][4]; of halves [4][E / 2][4]
  int64_t k_step;
  bool halves;             // V as value_codes.h has it, two numbers to a byte
  const float* k_scale;    // [64]
  const float* v_scale;
  const float* rate;       // [64]: of V's scales, for who sees all positions
  float unit;              // what a product of a rate counts
  const Turned* biases;
  int64_t bias_count;
  const float* turns;      // HrKv.turns
};

// Floats beside a tile: three numbers a position, and biases.
HR_INLINE int64_t floats_beside(int64_t size) { return 3 * kTile + 4 * size; }

// A scale so small that a head of it is zero beside anything else.
constexpr float kNothing = 1e-30f;

// Rates of positions from … to − 1 of a tile, zero elsewhere, by their scales → what one counts: not
// a number where a scale is none.
HR_INLINE float find_rates(const float* scale, int from, int to, float* rate) {
  F seen[kVectors], top = f_zero(), bad = f_zero();
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    seen[i] = f_range(f_load(scale + 16 * i), from - 16 * i, to - 16 * i, 0);
    top = f_max(top, seen[i]);
    bad = f_fma(seen[i], f_zero(), bad);
  }
  const float highest = f_highest(top);
  const F each = f_set(highest >= kNothing ? kWeightCodes / highest : 0.0f);
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) f_store(rate + 16 * i, f_mul(seen[i], each));
  return (highest >= kNothing ? highest / kWeightCodes : 0.0f) + f_sum(bad);
}

// The biases of head g that are not zero, turned to position `start` → how many there are.
HR_INLINE int64_t turn_biases(const HrKv& kv, int64_t g, int64_t start, Turned* to) {
  const float* bias = kv.bias + g * kv.head_dim;
  const int64_t half = kv.rotated / 2;
  int64_t count = 0;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t low = kv.interleaved ? 2 * i : i, high = kv.interleaved ? low + 1 : i + half;
    if (bias[low] == 0 && bias[high] == 0) continue;
    const float c = kv.bias_cos[start * half + i], s = kv.bias_sin[start * half + i];
    to[count++] = {__builtin_fmaf(-bias[high], s, bias[low] * c),
                   __builtin_fmaf(bias[low], s, bias[high] * c), static_cast<int32_t>(low),
                   static_cast<int32_t>(high)};
  }
  for (int64_t e = kv.rotated; e < kv.head_dim; ++e)
    if (bias[e] != 0) to[count++] = {bias[e], 0, static_cast<int32_t>(e), -1};
  return count;
}

// Scales of `have` positions from `position` on; zero behind them.
HR_INLINE void open_scales(const HrKv& kv, const int32_t* table, int64_t g, int64_t position,
                           int64_t have, float* k_scale, float* v_scale) {
  if (kv.block_size % 16 == 0) {
    const int64_t at = place_of(kv, table, g, position).scale;
    const int to = static_cast<int>(have);
    f_store(k_scale, f_range(f_bf16(kv.k_scale + at), 0, to, 0));
    f_store(v_scale, f_range(f_bf16(kv.v_scale + at), 0, to, 0));
    return;
  }
  for (int64_t j = 0; j < 16; ++j) {
    const bool exists = j < have;
    const int64_t at = exists ? place_of(kv, table, g, position + j).scale : 0;
    k_scale[j] = exists ? float_of(kv.k_scale[at]) : 0;
    v_scale[j] = exists ? float_of(kv.v_scale[at]) : 0;
  }
}

// Where V of a position lies, the first of four.
HR_INLINE const uint8_t* v_at(const HrKv& kv, const Place& place) {
  const int64_t first = place.page + place.within * kv.head_dim;
  return static_cast<const uint8_t*>(kv.v) + (kv.kind == HR_K8V4 ? first / 2 : first);
}

HR_INLINE void open_tile(const HrKv& kv, const int32_t* table, int64_t g, int64_t start,
                         int64_t length, const TileRoom<Codes>& room, Tile<Codes>* tile) {
  const int64_t size = kv.head_dim, block = kv.block_size;
  const bool small = block % 16 != 0, four = kv.kind == HR_K8V4 && kv.v;
  // Halves of E that are no whole vectors are looked up here.
  const bool halves = four && size % 32 == 0, moved = small || (four && !halves);
  float *k_scale = room.beside, *v_scale = k_scale + kTile, *rate = v_scale + kTile;
  tile->k_step = 4 * (small ? kTile : block);
  tile->halves = halves;
  tile->k_scale = k_scale;
  tile->v_scale = v_scale;
  tile->rate = rate;
  for (int i = 0; i < kVectors; ++i) {
    const int64_t position = start + 16 * i;
    const int64_t have = length - position < 16 ? length - position : 16;
    uint8_t *k = room.k + 64 * i, *v = room.v + 16 * i * size;
    begin_sixteen(room, i, size, have, tile);
    if (have <= 0) {
      f_store(k_scale + 16 * i, f_zero());
      f_store(v_scale + 16 * i, f_zero());
      continue;
    }
    open_scales(kv, table, g, position, have, k_scale + 16 * i, v_scale + 16 * i);
    if (!small) {
      const Place at = place_of(kv, table, g, position);
      tile->k[i] = static_cast<const uint8_t*>(kv.k) + at.page + 4 * at.within;
      if (kv.v && !moved) {
        tile->v[i] = v_at(kv, at);
        continue;
      }
    }
    for (int64_t j = 0; j < have; j += 4) {  // blocks are multiples of eight
      const Place at = place_of(kv, table, g, position + j);
      const uint8_t* from = static_cast<const uint8_t*>(kv.k) + at.page + 4 * at.within;
      if (small)
        for (int64_t s = 0; s < size / 4; ++s)
          memcpy(k + 4 * (s * kTile + j), from + 4 * s * block, 16);
      if (kv.v) {
        if (four && !halves) look_up(v_at(kv, at), size, v + j * size);
        else memcpy(v + (halves ? j / 2 : j) * size, v_at(kv, at), halves ? 2 * size : 4 * size);
        continue;
      }
      for (int64_t s = 0; s < size / 4; ++s)
        turn_cells(from + 4 * s * block, v + j * size + 16 * s);
    }
  }
  if (length - start >= kTile) tile->unit = find_rates(v_scale, 0, kTile, rate);
  tile->bias_count = 0;
  if (!kv.bias) return;
  auto* biases = reinterpret_cast<Turned*>(rate + kTile);
  tile->biases = biases;
  tile->bias_count = turn_biases(kv, g, start, biases);
  tile->turns = kv.turns;
}

// As for bf16 (tiles.h); scales are fetched at once.
HR_INLINE void look_ahead(const HrKv& kv, const int32_t* table, int64_t g, int64_t start,
                          int64_t length, Tile<Codes>* ahead) {
  if (kv.block_size % 16) return;
  for (int i = 0; i < kVectors && start + 16 * i < length; ++i) {
    const Place at = place_of(kv, table, g, start + 16 * i);
    ahead->k[i] = static_cast<const uint8_t*>(kv.k) + at.page + 4 * at.within;
    prefetch_l2(kv.k_scale + at.scale);
    prefetch_l2(kv.v_scale + at.scale);
    if (kv.v) ahead->v[i] = v_at(kv, at);
  }
}

}  // namespace

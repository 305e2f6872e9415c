// A tile: 64 positions of one sequence and KV head, as the products of attention read them.
//
// Tiles start at multiples of 64 of the *sequence*. A tile of bf16 pages or of int8 codes is read
// where it lies (blocks of 16 positions and more): four pointers, no copy. Everything else is brought
// into the thread's scratch first: V of a latent, which is K the other way round; fp32 and fp16 as
// fp32; V in four bits as eight; small pages position by position. Scales of codes always are: they
// go to the scores and to the weights of the positions (code_tiles.h).
//
// What lies behind the end of a sequence may be anything. In K it does not matter: its scores are
// replaced. V is not read there, but where a pair is half behind the end: 0 · NaN is NaN, so that
// block's V is copied and its one position zeroed (whole pages of codes are finite).
#pragma once
#include "pages.h"

namespace {

// So many latest positions a query sees, itself included; below zero: what of a chunk of so many
// lies before it; 0: all.
HR_INLINE int64_t window_of(const HrAttention& op, const HrStep& step) {
  const int64_t window = step.groups[op.kv.group].window;
  return op.chunked ? -window : window;
}

// The first position that the query at `position` sees; of a window perhaps one before the first.
HR_INLINE int64_t first_seen(int64_t position, int64_t window) {
  return window > 0 ? position - window + 1 : window < 0 ? position / -window * -window : 0;
}

constexpr int kTile = 64;
constexpr int kVectors = kTile / 16;

struct Floats {  // one value of E (or one position) a step, fp32 rows
  static constexpr int wide = 1;
  using Cell = float;
  using Row = float;
  using Vector = F;
  HR_INLINE F load(const float* p) { return f_load(p); }
  HR_INLINE F spread(const float* p) { return f_set(*p); }
  HR_INLINE F dot(F acc, F w, F x) { return f_fma(w, x, acc); }
  HR_INLINE void store(float* p, F x) { f_store(p, x); }
  HR_INLINE void store2(float* p, F x, F y) { f_store(p, x), f_store(p + 16, y); }
  HR_INLINE F exp2(F x) { return f_exp2<5>(x); }
};

struct Pairs {  // two a step, bf16
  static constexpr int wide = 2;
  using Cell = uint16_t;
  using Row = PairRow;
  using Vector = B;
  HR_INLINE B load(const uint16_t* p) { return b_load(p); }
  HR_INLINE B spread(const PairRow* p) { return b_spread(p); }
  HR_INLINE F dot(F acc, B w, B x) { return b_dot(acc, w, x); }
  HR_INLINE void store(PairRow* p, F x) { b_round(p, x); }
  HR_INLINE void store2(PairRow* p, F x, F y) { b_round2(p, x, y); }
  HR_INLINE F exp2(F x) { return f_exp2<4>(x); }
};

template <class T>
struct Tile {
  const typename T::Cell* k[kVectors];  // sixteen positions each; step s at k[i] + s · k_step
  const typename T::Cell* v[kVectors];  // sixteen positions each: [16 / wide][E][wide]
  int64_t k_step;
};

template <class T>
struct TileRoom {       // of one tile; two tiles are in work at once, whose K may be the same
  typename T::Cell* k;  // [E / wide][64][wide]
  typename T::Cell* v;  // [64 / wide][E][wide]
  float* beside;        // of codes: code_tiles.h
};

template <int K>
HR_INLINE float kv_float(const void* base, int64_t at) {
  if constexpr (K == HR_F32) return static_cast<const float*>(base)[at];
  return f_half(static_cast<const uint16_t*>(base)[at]);
}

template <int K>
HR_INLINE F kv_floats(const void* base, int64_t at) {
  if constexpr (K == HR_F32) return f_load(static_cast<const float*>(base) + at);
  return f_half(static_cast<const uint16_t*>(base) + at);
}

// V of a latent is K, which lies the other way: that of `have` positions, at k + step · E / wide.
HR_INLINE void turn(const float* k, int64_t step, int64_t have, float* v, int64_t size) {
  for (int64_t j = 0; j < have; ++j)
    for (int64_t e = 0; e < size; ++e) v[j * size + e] = k[e * step + j];
}

// Pairs along E to pairs of positions; of an odd number the last pair's second is anything.
HR_INLINE void turn(const uint16_t* k, int64_t step, int64_t have, uint16_t* v, int64_t size) {
  for (int64_t j = 0; j < have; j += 2)
    for (int64_t s = 0; s < size / 2; ++s) {
      uint32_t one, other;
      memcpy(&one, k + s * step + 2 * j, 4);
      memcpy(&other, k + s * step + 2 * j + 2, 4);
      const uint32_t both[2] = {(one & 0xffffu) | other << 16, one >> 16 | (other & 0xffff0000u)};
      memcpy(v + j * size + 4 * s, both, 8);
    }
}

struct Place {  // of position p: its page, and where in it
  int64_t page, within, scale;
};
HR_INLINE Place place_of(const HrKv& kv, const int32_t* table, int64_t g, int64_t p) {
  const int64_t block = table[p / kv.block_size], within = p % kv.block_size;
  return {page_of(kv, block, g), within, (block * kv.kv_heads + g) * kv.block_size + within};
}

// fp32 and fp16: everything as fp32 in the room.
template <int K>
void gather_floats(const HrKv& kv, const int32_t* table, int64_t g, int64_t start, int64_t length,
                   const TileRoom<Floats>& to) {
  const int64_t size = kv.head_dim, block = kv.block_size;
  for (int i = 0; i < kTile; i += 16) {
    const int64_t position = start + i, have = length - position < 16 ? length - position : 16;
    if (have <= 0) break;
    if (block % 16) {
      for (int64_t j = 0; j < have; ++j) {
        const Place at = place_of(kv, table, g, position + j);
        for (int64_t e = 0; e < size; ++e) {
          to.k[e * kTile + i + j] = kv_float<K>(kv.k, at.page + e * block + at.within);
          if (kv.v) to.v[(i + j) * size + e] = kv_float<K>(kv.v, at.page + at.within * size + e);
        }
      }
    } else {
      const Place at = place_of(kv, table, g, position);
      for (int64_t e = 0; e < size; ++e)
        f_store(to.k + e * kTile + i, kv_floats<K>(kv.k, at.page + e * block + at.within));
      for (int64_t e = 0; kv.v && e < have * size; e += 16)
        f_store(to.v + i * size + e, kv_floats<K>(kv.v, at.page + at.within * size + e));
    }
    if (!kv.v) turn(to.k + i, kTile, have, to.v + i * size, size);
  }
}

HR_INLINE void open_tile(const HrKv& kv, const int32_t* table, int64_t g, int64_t start,
                         int64_t length, const TileRoom<Floats>& room, Tile<Floats>* tile) {
  if (kv.kind == HR_F32) gather_floats<HR_F32>(kv, table, g, start, length, room);
  else gather_floats<HR_F16>(kv, table, g, start, length, room);
  for (int i = 0; i < kVectors; ++i) {
    tile->k[i] = room.k + 16 * i;
    tile->v[i] = room.v + 16 * i * kv.head_dim;
  }
  tile->k_step = kTile;
}

// Pages of fewer than sixteen positions: `have` of them, one by one.
HR_INLINE void gather_few(const HrKv& kv, const int32_t* table, int64_t g, int64_t position,
                          int64_t have, int64_t i, const TileRoom<Pairs>& to) {
  const int64_t size = kv.head_dim, block = kv.block_size;
  for (int64_t j = 0; j < have; ++j) {
    const Place at = place_of(kv, table, g, position + j);
    const uint16_t* k = static_cast<const uint16_t*>(kv.k) + at.page + 2 * at.within;
    for (int64_t e = 0; e < size; ++e)
      to.k[e / 2 * 2 * kTile + 2 * (i + j) + e % 2] = k[e / 2 * 2 * block + e % 2];
    if (!kv.v) continue;
    const uint16_t* v = static_cast<const uint16_t*>(kv.v) + at.page + at.within / 2 * 2 * size + at.within % 2;
    for (int64_t e = 0; e < size; ++e) to.v[(i + j) / 2 * 2 * size + 2 * e + j % 2] = v[2 * e];
  }
}

HR_INLINE void zero_one(uint16_t* v, int64_t size, int64_t at) {  // v: [8][E][2]
  for (int64_t e = 0; e < size; ++e) v[at / 2 * 2 * size + 2 * e + at % 2] = 0;
}

// Sixteen positions of a tile, of which `have` exist: in the room, unless they are found elsewhere.
// Of none K is never read but by products whose scores are replaced.
template <class T>
HR_INLINE void begin_sixteen(const TileRoom<T>& room, int i, int64_t size, int64_t have,
                             Tile<T>* tile) {
  tile->k[i] = i == 0 || have > 0 ? room.k + 16 * T::wide * i : tile->k[0];
  tile->v[i] = room.v + 16 * i * size;
}

HR_INLINE void open_tile(const HrKv& kv, const int32_t* table, int64_t g, int64_t start,
                         int64_t length, const TileRoom<Pairs>& room, Tile<Pairs>* tile) {
  const int64_t size = kv.head_dim, block = kv.block_size;
  tile->k_step = 2 * (block % 16 ? kTile : block);
  for (int i = 0; i < kVectors; ++i) {
    const int64_t position = start + 16 * i;
    const int64_t have = length - position < 16 ? length - position : 16;
    uint16_t* v = room.v + 16 * i * size;
    begin_sixteen(room, i, size, have, tile);
    if (have <= 0) continue;
    if (block % 16) {
      gather_few(kv, table, g, position, have, 16 * i, room);
    } else {
      const Place at = place_of(kv, table, g, position);
      tile->k[i] = static_cast<const uint16_t*>(kv.k) + at.page + 2 * at.within;
      if (kv.v) {
        const uint16_t* pv = static_cast<const uint16_t*>(kv.v) + at.page + at.within * size;
        if (have % 2 == 0) tile->v[i] = pv;
        else memcpy(v, pv, static_cast<size_t>(16 * size) * 2);
      }
    }
    if (!kv.v) turn(tile->k[i], tile->k_step, have, v, size);
    if (have % 2) zero_one(v, size, have);
  }
}

// Where K and V of the tile at `start` lie, to be fetched early; what is to be copied or does not
// exist is left as it was.
HR_INLINE void look_ahead(const HrKv&, const int32_t*, int64_t, int64_t, int64_t, Tile<Floats>*) {}

HR_INLINE void look_ahead(const HrKv& kv, const int32_t* table, int64_t g, int64_t start,
                          int64_t length, Tile<Pairs>* ahead) {
  if (kv.block_size % 16) return;
  for (int i = 0; i < kVectors && start + 16 * i < length; ++i) {
    const Place at = place_of(kv, table, g, start + 16 * i);
    ahead->k[i] = static_cast<const uint16_t*>(kv.k) + at.page + 2 * at.within;
    if (kv.v) ahead->v[i] = static_cast<const uint16_t*>(kv.v) + at.page + at.within * kv.head_dim;
  }
}

}  // namespace

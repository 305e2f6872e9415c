// A tile: 64 positions of one sequence and KV head, as the products of attention read them.
//
// Tiles start at multiples of 64 of the *sequence*. A tile of bf16 pages is read where it lies
// (blocks of 16 positions and more): four pointers, no copy. Everything else is brought into the
// thread's scratch first: V of a latent, which is K the other way round; fp32 and fp16 as fp32, int8 widened to bf16 (exact; its scales go to the
// scores and to the weights of the positions), small pages position by position.
//
// What lies behind the end of a sequence may be anything. In K it does not matter: its scores are
// replaced. V is not read there, but where a pair is half behind the end: 0 · NaN is NaN, so that
// block's V is copied and its one position zeroed (whole int8 pages are finite).
#pragma once
#include "pages.h"

namespace {

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
  const float* k_scale;  // [64], or null
  const float* v_scale;
};

template <class T>
struct TileRoom {       // of one tile; two tiles are in work at once, whose K may be the same
  typename T::Cell* k;  // [E / wide][64][wide]
  typename T::Cell* v;  // [64 / wide][E][wide]
  float* k_scale;       // [64]
  float* v_scale;
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

// Where the codes of a tile lie that is opened later, to be fetched while this one's are widened.
struct FarCodes {
  const int8_t* k[kVectors] = {};  // null: none, or pages too small to be worth it
  const int8_t* v[kVectors] = {};
};

HR_INLINE FarCodes far_codes(const HrKv& kv, const int32_t* table, int64_t g, int64_t start,
                             int64_t length) {
  FarCodes far;
  if (!in_codes(kv.kind) || kv.block_size % 16) return far;
  for (int i = 0; i < kVectors && start + 16 * i < length; ++i) {
    const Place at = place_of(kv, table, g, start + 16 * i);
    far.k[i] = static_cast<const int8_t*>(kv.k) + at.page + 2 * at.within;
    if (!kv.v) continue;
    const int64_t first = at.page + at.within * kv.head_dim;
    far.v[i] = static_cast<const int8_t*>(kv.v) + (kv.kind == HR_I8 ? first : first / 2);
  }
  return far;
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
                         int64_t length, const FarCodes&, const TileRoom<Floats>& room,
                         Tile<Floats>* tile) {
  if (kv.kind == HR_F32) gather_floats<HR_F32>(kv, table, g, start, length, room);
  else gather_floats<HR_F16>(kv, table, g, start, length, room);
  for (int i = 0; i < kVectors; ++i) {
    tile->k[i] = room.k + 16 * i;
    tile->v[i] = room.v + 16 * i * kv.head_dim;
  }
  tile->k_step = kTile;
  tile->k_scale = tile->v_scale = nullptr;
}

// Pages of fewer than sixteen positions: `have` of them, one by one.
template <class C, class Put>
HR_INLINE void gather_few(const HrKv& kv, const int32_t* table, int64_t g, int64_t position,
                          int64_t have, int64_t i, const TileRoom<Pairs>& to, Put put_cell) {
  const int64_t size = kv.head_dim, block = kv.block_size;
  for (int64_t j = 0; j < have; ++j) {
    const Place at = place_of(kv, table, g, position + j);
    const C* k = static_cast<const C*>(kv.k) + at.page + 2 * at.within;
    for (int64_t e = 0; e < size; ++e)
      to.k[e / 2 * 2 * kTile + 2 * (i + j) + e % 2] = put_cell(k[e / 2 * 2 * block + e % 2]);
    if (!kv.v) continue;
    const C* v = static_cast<const C*>(kv.v) + at.page + at.within / 2 * 2 * size + at.within % 2;
    const uint8_t* codes = static_cast<const uint8_t*>(kv.v) + (at.page + at.within * size) / 2;
    for (int64_t e = 0; e < size; ++e) {
      uint16_t& cell = to.v[(i + j) / 2 * 2 * size + 2 * e + j % 2];
      if (kv.kind != HR_K8V4) cell = put_cell(v[2 * e]);
      else cell = level_of(e < size / 2 ? codes[e] & 15 : codes[e - size / 2] >> 4);
    }
  }
}

HR_INLINE void zero_one(uint16_t* v, int64_t size, int64_t at) {  // v: [8][E][2]
  for (int64_t e = 0; e < size; ++e) v[at / 2 * 2 * size + 2 * e + at % 2] = 0;
}

// To a tile of codes what its keys are kept without (kernels/key_bias.py), in units of the codes:
// what the tile's first position turns the bias to, turned further for each position.
void add_bias(const HrKv& kv, int64_t g, int64_t start, const TileRoom<Pairs>& room) {
  const int64_t size = kv.head_dim, half = kv.rotated / 2;
  const float* bias = kv.bias + g * size;
  float units[2 * kTile];  // codes a one, of both numbers of a pair
  for (int j = 0; j < kTile; ++j) {
    const float scale = room.k_scale[j];
    units[2 * j] = units[2 * j + 1] = scale == 0 ? 0 : 1.0f / scale;  // 0: there is no position
  }
  for (int64_t row = 0; row < size / 2; ++row) {
    float along[16], across[16];  // factors of cosine and sine, of both numbers in turns
    bool some = false;
    for (int64_t side = 0; side < 2; ++side) {
      const int64_t e = 2 * row + side;
      float a = bias[e], b = 0;
      if (e < kv.rotated) {
        const int64_t angle = kv.interleaved ? e / 2 : e % half;
        const bool first = kv.interleaved ? !side : e < half;
        const int64_t low = kv.interleaved ? e - side : angle, high = low + (kv.interleaved ? 1 : half);
        const float c = kv.bias_cos[start * half + angle], s = kv.bias_sin[start * half + angle];
        const float x = __builtin_fmaf(-bias[high], s, bias[low] * c);
        const float y = __builtin_fmaf(bias[low], s, bias[high] * c);
        a = first ? x : y;
        b = first ? -y : x;
      }
      some |= a != 0 || b != 0;
      for (int64_t i = side; i < 16; i += 2) along[i] = a, across[i] = b;
    }
    if (!some) continue;
    uint16_t* k = room.k + row * 2 * kTile;
    const float *cosine = kv.turns + row * 2 * kTile, *sine = cosine + size * kTile;
    const F a = f_load(along), b = f_load(across);
    for (int64_t i = 0; i < 2 * kTile; i += 16) {
      const F turned = f_fma(a, f_load(cosine + i), f_mul(b, f_load(sine + i)));
      store_cells(k + i, f_fma(turned, f_load(units + i), f_bf16(k + i)));
    }
  }
}

// Scales of `have` positions from `position` on; zero behind them.
HR_INLINE void open_scales(const HrKv& kv, const int32_t* table, int64_t g, int64_t position,
                           int64_t have, int64_t i, const TileRoom<Pairs>& room) {
  if (kv.block_size % 16 == 0) {
    const int64_t at = place_of(kv, table, g, position).scale;
    const int to = static_cast<int>(have);
    f_store(room.k_scale + i, f_range(f_bf16(kv.k_scale + at), 0, to, 0));
    f_store(room.v_scale + i, f_range(f_bf16(kv.v_scale + at), 0, to, 0));
    return;
  }
  for (int64_t j = 0; j < 16; ++j) {
    const bool exists = j < have;
    const int64_t at = exists ? place_of(kv, table, g, position + j).scale : 0;
    room.k_scale[i + j] = exists ? float_of(kv.k_scale[at]) : 0;
    room.v_scale[i + j] = exists ? float_of(kv.v_scale[at]) : 0;
  }
}

HR_INLINE void open_tile(const HrKv& kv, const int32_t* table, int64_t g, int64_t start,
                         int64_t length, const FarCodes& far, const TileRoom<Pairs>& room,
                         Tile<Pairs>* tile) {
  const int64_t size = kv.head_dim, block = kv.block_size;
  const bool codes = in_codes(kv.kind), four = kv.kind == HR_K8V4, copied = codes || block % 16;
  tile->k_step = 2 * (copied ? kTile : block);
  tile->k_scale = codes ? room.k_scale : nullptr;
  tile->v_scale = codes ? room.v_scale : nullptr;
  for (int i = 0; i < kVectors; ++i) {
    const int64_t position = start + 16 * i;
    const int64_t have = length - position < 16 ? length - position : 16;
    uint16_t *k = room.k + 32 * i, *v = room.v + 16 * i * size;
    tile->k[i] = k;
    tile->v[i] = v;
    if (have <= 0) {  // never read but by the products of K, whose scores are replaced
      tile->k[i] = tile->k[0];
      if (codes)
        for (int j = 0; j < 16; ++j) room.k_scale[16 * i + j] = room.v_scale[16 * i + j] = 0;
      continue;
    }
    if (codes) open_scales(kv, table, g, position, have, 16 * i, room);
    if (block % 16) {
      if (codes)
        gather_few<int8_t>(kv, table, g, position, have, 16 * i, room, bf16_of);
      else
        gather_few<uint16_t>(kv, table, g, position, have, 16 * i, room,
                             [](uint16_t x) { return x; });
    } else {
      const Place at = place_of(kv, table, g, position);
      const int64_t from_k = at.page + 2 * at.within, from_v = at.page + at.within * size;
      if (codes) {
        const auto* pk = static_cast<const int8_t*>(kv.k) + from_k;
        const int8_t* next_k = far.k[i] ? far.k[i] : pk;
        for (int64_t s = 0; s < size / 2; ++s) {
          prefetch_l2(next_k + s * 2 * block);
          b_widen(k + s * 2 * kTile, pk + s * 2 * block);
        }
        if (kv.v) {
          const auto* pv = static_cast<const int8_t*>(kv.v) + (four ? from_v / 2 : from_v);
          const int8_t* next_v = far.v[i] ? far.v[i] : pv;
          if (four) {
            const auto* bytes = reinterpret_cast<const uint8_t*>(pv);
            for (int64_t at = 0; at < 16 * size; at += 2 * size, bytes += size) {  // two tokens
              prefetch_l2(next_v + at / 2);
              widen_values(v + at, bytes, bytes + size / 2, size);
            }
            continue;
          }
          for (int64_t e = 0; e < 16 * size; e += 32) {
            prefetch_l2(next_v + e);
            b_widen(v + e, pv + e);
          }
          continue;
        }
      } else {
        tile->k[i] = static_cast<const uint16_t*>(kv.k) + from_k;
      }
      if (kv.v) {
        const uint16_t* pv = static_cast<const uint16_t*>(kv.v) + from_v;
        if (have % 2 == 0) tile->v[i] = pv;
        else memcpy(v, pv, static_cast<size_t>(16 * size) * 2);
      }
    }
    if (!kv.v) turn(tile->k[i], tile->k_step, have, v, size);
    if (have % 2) zero_one(v, size, have);
  }
  if (codes && kv.bias) add_bias(kv, g, start, room);
}

// Where K and V of the tile at `start` lie, to be fetched early; what is to be copied or does not
// exist is left as it was.
HR_INLINE void look_ahead(const HrKv&, const int32_t*, int64_t, int64_t, int64_t, Tile<Floats>*) {}

HR_INLINE void look_ahead(const HrKv& kv, const int32_t* table, int64_t g, int64_t start,
                          int64_t length, Tile<Pairs>* ahead) {
  if (in_codes(kv.kind) || kv.block_size % 16) return;
  for (int i = 0; i < kVectors && start + 16 * i < length; ++i) {
    const Place at = place_of(kv, table, g, start + 16 * i);
    ahead->k[i] = static_cast<const uint16_t*>(kv.k) + at.page + 2 * at.within;
    if (kv.v) ahead->v[i] = static_cast<const uint16_t*>(kv.v) + at.page + at.within * kv.head_dim;
  }
}

}  // namespace

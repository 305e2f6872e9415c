// Causal attention over the paged KV, decode and prefill in one kernel.
//
// The arithmetic. A query row and KV position cost 2E multiply-adds per query head and read
// 2E values per KV head. Decode is bound by reading KV (default model, bf16: 12 KiB a position of
// context, against 391 MB of weights a token: 1 % per 325 positions); prefill by the fp32 fma
// rate: 4 · H · E · L² / 2 operations a layer. The R = H / G query heads of a KV head are rows of
// one small product, so K and V are read once per KV head, not per query head.
//
// K lies transposed in its page ([E][S], written so by rope): sixteen positions are sixteen lanes
// and a score is a fused chain over E; V lies [S][E]: lanes are E. So neither product sums lanes.
//
// Rows are taken kRowsA at a time over tiles of 64 positions that start at multiples of 64 of the
// *sequence*, in order, with the online softmax (Milakov and Gimelshein 2018): which tiles a row
// sees and the order of every sum depend on its position alone. Positions that a row must not see
// get the weight exactly zero and tiles beyond its own are skipped for the row, so a row's bits
// are the same in a chunk of 512, in a chunk of one and in any batch.
#pragma once
#include "rows.h"

namespace {

constexpr int kTile = 64;            // KV positions of a tile
constexpr int kVectors = kTile / 16;
constexpr int kRowsA = 6;            // query rows in registers
constexpr int kQueryRows = 96;       // query rows of an item, about
constexpr float kFloor = -1e30f;     // what a running maximum starts from: finite, so that
                                     // exp(−inf − kFloor) is 0 and not NaN

template <int K>
HR_INLINE F kv_load(const void* base, int64_t at) {
  if constexpr (K == HR_F32) return f_load(static_cast<const float*>(base) + at);
  if constexpr (K == HR_F16) return f_half(static_cast<const uint16_t*>(base) + at);
  return f_bf16(static_cast<const uint16_t*>(base) + at);
}

template <int K>
HR_INLINE float kv_one(const void* base, int64_t at) {
  if constexpr (K == HR_F32) return static_cast<const float*>(base)[at];
  const uint16_t bits = static_cast<const uint16_t*>(base)[at];
  if constexpr (K == HR_F16) return _cvtsh_ss(bits);
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  memcpy(&x, &wide, 4);
  return x;
}

// scores[m][64] = q[m] · K over one tile; k[e · 64 + position], fp32.
template <int M>
HR_INLINE void score_rows(const float* const* q, int64_t size, const float* k, float* scores) {
  F acc[M][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[m][v] = f_zero();
  for (int64_t e = 0; e < size; ++e) {
    F kk[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) kk[v] = f_load(k + e * kTile + 16 * v);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      F x = f_set(q[m][e]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[m][v] = f_fma(x, kk[v], acc[m][v]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) f_store(scores + m * kTile + 16 * v, acc[m][v]);
}

// out[m] = out[m] · factor[m] + p[m] · V, over 64 columns of E at a time; v[position · size + e].
template <int M, int W>
HR_INLINE void value_columns(const float* p, const float* v, int64_t size, int64_t column,
                             int count, const float* factor, float* out) {
  F acc[M][W];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w)
      acc[m][w] = f_mul(f_load(out + m * size + column + 16 * w), f_set(factor[m]));
  for (int j = 0; j < count; ++j) {
    F vv[W];
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) vv[w] = f_load(v + j * size + column + 16 * w);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      F x = f_set(p[m * kTile + j]);
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) acc[m][w] = f_fma(x, vv[w], acc[m][w]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) f_store(out + m * size + column + 16 * w, acc[m][w]);
}

template <int M>
void value_rows(const float* p, const float* v, int64_t size, int count, const float* factor,
                float* out) {
  int64_t column = 0;
  for (; column + 64 <= size; column += 64)
    value_columns<M, 4>(p, v, size, column, count, factor, out);
  for (; column < size; column += 16)
    value_columns<M, 1>(p, v, size, column, count, factor, out);
}

template <int M>
void tile_rows(const HrAttention& op, int64_t window, const float* const* q,
               const int64_t* position, int64_t tile, int count, const float* k, const float* v, float* scores, float* highest,
               float* total, float* out) {
  const int64_t size = op.kv.head_dim;
  score_rows<M>(q, size, k, scores);
  float factor[M];
  for (int m = 0; m < M; ++m) {
    // Positions of this tile that row m sees: [from, to).
    const int64_t start = tile * kTile;
    int64_t from = window > 0 ? position[m] - window + 1 - start : 0;
    int64_t to = position[m] + 1 - start;
    if (from < 0) from = 0;
    if (to > kTile) to = kTile;
    float* s = scores + m * kTile;
    if (from >= to) {  // nothing here for this row: leave everything as it was
      factor[m] = 1.0f;
      memset(s, 0, kTile * sizeof(float));
      continue;
    }
    F top = f_set(kFloor);
    F x[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      x[i] = f_mul(f_load(s + 16 * i), f_set(op.scale));
      if (op.softcap > 0) {
        F cap = f_set(op.softcap);
        x[i] = f_mul(cap, f_tanh(f_div(x[i], cap)));
      }
      if (from > 16 * i || to < 16 * i + 16) {
        float lanes[16];
        f_store(lanes, x[i]);
        for (int j = 0; j < 16; ++j)
          if (16 * i + j < from || 16 * i + j >= to) lanes[j] = -__builtin_inff();
        x[i] = f_load(lanes);
      }
      top = f_max(top, x[i]);
    }
    const float was = highest[m];
    const float tile_top = f_highest(top);
    const float now = tile_top > was ? tile_top : was;
    F sum = f_zero();
    for (int i = 0; i < kVectors; ++i) {
      F e = f_exp(f_sub(x[i], f_set(now)));
      sum = f_add(sum, e);
      f_store(s + 16 * i, e);
    }
    float scratch[16];
    f_store(scratch, f_exp(f_set(was - now)));
    factor[m] = scratch[0];
    highest[m] = now;
    total[m] = total[m] * factor[m] + f_sum(sum);
  }
  value_rows<M>(scores, v, size, count, factor, out);
}

struct AttentionScratch {  // sizes for head size E: see attention_scratch
  float* k;        // [E][64]
  float* v;        // [64][E]
  float* scores;   // [6][64]
  float* out;      // [rows][E]
  float* highest;  // [rows]
  float* total;
  const float** q;
  int64_t* position;
};

HR_INLINE int64_t rows_of_item(const HrKv& kv) {
  const int64_t heads = kv.heads / kv.kv_heads;
  return heads > kQueryRows ? heads : kQueryRows / heads * heads;
}

HR_INLINE int64_t attention_scratch(const HrKv& kv) {
  const int64_t rows = rows_of_item(kv), size = kv.head_dim;
  return 4 * (2 * kTile * size + kRowsA * kTile + rows * size + 2 * rows) + 16 * rows + 1024;
}

HR_INLINE AttentionScratch carve(const HrKv& kv, uint8_t* at) {
  const int64_t rows = rows_of_item(kv), size = kv.head_dim;
  AttentionScratch s;
  s.k = reinterpret_cast<float*>(at);
  s.v = s.k + kTile * size;
  s.scores = s.v + kTile * size;
  s.out = s.scores + kRowsA * kTile;
  s.highest = s.out + rows * size;
  s.total = s.highest + rows;
  s.q = reinterpret_cast<const float**>(s.total + rows + (rows & 1));
  s.position = reinterpret_cast<int64_t*>(s.q + rows);
  return s;
}

// The tile's K and V as fp32, from its pages. Positions past the end of the sequence are zero:
// what an unwritten slot holds may be anything, and 0 · NaN is NaN.
template <int K>
void gather(const HrKv& kv, const int32_t* table, int g, int64_t tile, int64_t length, float* k,
            float* v) {
  const int64_t size = kv.head_dim, block = kv.block_size;
  for (int i = 0; i < kVectors; ++i) {
    const int64_t position = tile * kTile + 16 * i;
    if (position >= length) {
      for (int64_t e = 0; e < size; ++e) f_store(k + e * kTile + 16 * i, f_zero());
      memset(v + 16 * i * size, 0, static_cast<size_t>(16 * size) * 4);
      continue;
    }
    if (block % 16) {  // small pages: position by position
      for (int64_t j = 0; j < 16; ++j) {
        const bool exists = position + j < length;
        const int64_t at = exists ? position + j : 0;
        const int64_t start =
            (static_cast<int64_t>(table[at / block]) * kv.kv_heads + g) * size * block;
        for (int64_t e = 0; e < size; ++e) {
          k[e * kTile + 16 * i + j] = exists ? kv_one<K>(kv.k, start + e * block + at % block) : 0;
          v[(16 * i + j) * size + e] = exists ? kv_one<K>(kv.v, start + at % block * size + e) : 0;
        }
      }
      continue;
    }
    const int64_t page = (static_cast<int64_t>(table[position / block]) * kv.kv_heads + g) * size * block;
    const int64_t within = position % block;
    for (int64_t e = 0; e < size; ++e)
      f_store(k + e * kTile + 16 * i, kv_load<K>(kv.k, page + e * block + within));
    const int64_t from = page + within * size;
    const int64_t have = length - position < 16 ? length - position : 16;
    for (int64_t e = 0; e < have * size; e += 16)
      f_store(v + 16 * i * size + e, kv_load<K>(kv.v, from + e));
    if (have < 16) {
      memset(v + (16 * i + have) * size, 0, static_cast<size_t>((16 - have) * size) * 4);
      for (int64_t e = 0; e < size; ++e)
        for (int64_t j = have; j < 16; ++j) k[e * kTile + 16 * i + j] = 0;
    }
  }
}

HR_INLINE void gather_any(const HrKv& kv, const int32_t* table, int g, int64_t tile,
                          int64_t length, float* k, float* v) {
  switch (kv.kind) {
    case HR_F32: return gather<HR_F32>(kv, table, g, tile, length, k, v);
    case HR_F16: return gather<HR_F16>(kv, table, g, tile, length, k, v);
    default: return gather<HR_BF16>(kv, table, g, tile, length, k, v);
  }
}

// One item: tokens [first, last) of entry b, and the query heads of KV head g.
void attend(const HrAttention& op, const HrStep& step, int b, int g, int64_t first, int64_t last,
            uint8_t* scratch) {
  const HrKv& kv = op.kv;
  const int64_t size = kv.head_dim, heads = kv.heads / kv.kv_heads;
  const HrGroup& group = step.groups[kv.group];
  const int64_t window = group.window;
  const int32_t* table = group.tables + b * group.table_stride;
  const int64_t length = step.lengths[b];
  AttentionScratch s = carve(kv, scratch);
  const int64_t rows = (last - first) * heads;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = first + r / heads;
    s.q[r] = op.q + token * op.stride + (g * heads + r % heads) * size;
    s.position[r] = step.positions[token];
    s.highest[r] = kFloor;
    s.total[r] = 0;
  }
  memset(s.out, 0, static_cast<size_t>(rows * size) * 4);
  const int64_t lowest = s.position[0];
  const int64_t begin = window > 0 && lowest >= window ? (lowest - window + 1) / kTile : 0;
  const int64_t end = s.position[rows - 1] / kTile + 1;
  for (int64_t tile = begin; tile < end; ++tile) {
    gather_any(kv, table, g, tile, length, s.k, s.v);
    const int64_t left = length - tile * kTile;
    const int count = static_cast<int>(left < kTile ? left : kTile);
    for (int64_t r = 0; r < rows; r += kRowsA) {
      const int m = static_cast<int>(rows - r < kRowsA ? rows - r : kRowsA);
      if (s.position[r + m - 1] < tile * kTile) continue;  // the tile is in these rows' future
#define HR_CASE(M)                                                                             \
  case M:                                                                                      \
    tile_rows<M>(op, window, s.q + r, s.position + r, tile, count, s.k, s.v, s.scores, s.highest + r,  \
                 s.total + r, s.out + r * size);                                               \
    break;
      switch (m) { HR_CASE(1) HR_CASE(2) HR_CASE(3) HR_CASE(4) HR_CASE(5) HR_CASE(6) }
#undef HR_CASE
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = first + r / heads, at = (g * heads + r % heads) * size;
    F inverse = f_set(1.0f / s.total[r]);
    float* out = s.out + r * size;
    for (int64_t e = 0; e < size; e += 16) f_store(out + e, f_mul(f_load(out + e), inverse));
    if (op.y) memcpy(op.y + token * op.y_stride + at, out, static_cast<size_t>(size) * 4);
    if (op.out.six)  // E is a multiple of 32 here: Python saw to it
      quantise_row(out, size, op.out, token, at / 32);
  }
}

void op_attention(const HrAttention& op, const hr::Work& work) {
  const HrStep& step = *work.step;
  const int64_t per_item = rows_of_item(op.kv) / (op.kv.heads / op.kv.kv_heads);
  int64_t begin = 0, item = work.next();
  for (int b = 0; b < step.b; ++b) {
    const int64_t start = step.query_starts[b], stop = step.query_starts[b + 1];
    const int64_t pieces = (stop - start + per_item - 1) / per_item;
    const int64_t items = pieces * op.kv.kv_heads;
    for (; item < begin + items; item = work.next()) {
      // The longest first: later tokens see more of the context.
      const int64_t piece = pieces - 1 - (item - begin) / op.kv.kv_heads;
      const int g = static_cast<int>((item - begin) % op.kv.kv_heads);
      const int64_t first = start + piece * per_item;
      const int64_t last = first + per_item < stop ? first + per_item : stop;
      attend(op, step, b, g, first, last, work.scratch);
    }
    begin += items;
  }
}

}  // namespace

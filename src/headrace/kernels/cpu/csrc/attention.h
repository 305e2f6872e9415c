// Causal attention over the paged KV, decode and prefill in one kernel.
//
// The arithmetic. A query row and KV position cost 2E multiply-adds per query head and read
// 2E values per KV head. Prefill of L tokens: 2 · H · E · L² operations a layer (multiply and add
// counted, half of the square seen); the default model (24 · 14 · 64) at 2,048 tokens 0.180 TFLOP. One
// Zen 4 core gives 117 GFLOP/s in fp32 and 235 with vdpbf16ps (measured): two cores need at least
// 0.77 s and 0.38 s. Beside them stands one exp per score, 0.7 · 10⁹ of them: about ten
// vector operations for sixteen, half of them on other ports: 0.06 to 0.1 s.
// Decode reads the KV: default model, bf16, 12 KiB a position, against 391 MB of weights a token
// (1 % per 325 positions); int8 half of that and 6 % for the scales.
//
// The R = H / G query heads of a KV head are rows of one small product, so K and V are read once
// per KV head, not per query head. Rows go in groups of up to seven over tiles of 64 positions
// (tiles.h): all rows of an item over one tile, which lies in L1 then (16 KB), before the next.
// Scores are sums over E with positions as lanes, results sums over positions with E as lanes:
// no lane is ever summed with another but in the softmax's denominator.
//
// Online softmax (Milakov and Gimelshein 2018) in base 2: queries are multiplied by scale · log2 e
// (by scale alone under a soft cap) when they are packed, and rounded to bf16 where K is. Which
// tiles a row sees and the order of every sum depend on its position alone; positions that it must
// not see get the weight exactly zero, and a tile without a visible one changes nothing. So a
// row's bits are the same in a chunk of 512, in a chunk of one, and in any batch.
//
// Items run KV head by KV head, then sequence by sequence: sequences that share a prefix find its
// pages of this head in L2, where the thread's previous item left them.
#pragma once
#include "rope.h"
#include "rows.h"
#include "tiles.h"

namespace {

constexpr int kRowsA = 7;            // query rows of a product, at most
constexpr int kQueryRows = 96;       // query rows of an item, about
constexpr float kLog2e = 1.44269504088896341f;
constexpr float kFloor = -1e30f;     // what a running maximum starts from: finite, so that
                                     // 2^(−inf − kFloor) is 0 and not NaN

// scores[m][64] = q[m] · K over one tile; q: [E / wide][M][wide].
template <class T, int M>
HR_INLINE void score_rows(const typename T::Row* q, int64_t size, const Tile<T>& tile,
                          float* scores) {
  F acc[M][kVectors];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) acc[m][v] = f_zero();
  const typename T::Cell* k[kVectors] = {tile.k[0], tile.k[1], tile.k[2], tile.k[3]};
  const int64_t k_step = tile.k_step;
  for (int64_t step = 0; step < size / T::wide; ++step) {
    typename T::Vector w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = T::load(k[v] + step * k_step);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      auto x = T::spread(q + (step * M + m) * T::wide);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[m][v] = T::dot(acc[m][v], w[v], x);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) f_store(scores + m * kTile + 16 * v, acc[m][v]);
}

// out[m] = out[m] · factor[m] + p[m] · V over 16 · W columns of E; p: [M][64].
template <class T, int M, int W>
HR_INLINE void value_columns(const typename T::Row* p, const Tile<T>& tile, int64_t size,
                             int64_t column, int count, const float* factor, float* out) {
  F acc[M][W];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w)
      acc[m][w] = f_mul(f_load(out + m * size + column + 16 * w), f_set(factor[m]));
  for (int block = 0; block * 16 < count; ++block) {
    const typename T::Cell* v = tile.v[block] + column * T::wide;
    const int steps = ((count - 16 * block < 16 ? count - 16 * block : 16) + T::wide - 1) / T::wide;
    for (int j = 0; j < steps; ++j, v += size * T::wide) {
      typename T::Vector vv[W];
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) vv[w] = T::load(v + 16 * T::wide * w);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        auto x = T::spread(p + m * kTile + 16 * block + j * T::wide);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) acc[m][w] = T::dot(acc[m][w], vv[w], x);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) f_store(out + m * size + column + 16 * w, acc[m][w]);
}

template <class T, int M>
void tile_rows(const HrAttention& op, int64_t window, const typename T::Row* q, const int64_t* position,
               int64_t start, const Tile<T>& tile, float* scores, typename T::Row* p,
               float* highest, float* total, float* out) {
  const int64_t size = op.kv.head_dim;
  score_rows<T, M>(q, size, tile, scores);

  float top[16] = {0}, was[16] = {0}, factor[16];
  int count = 0;  // positions of the tile that some row sees
  for (int m = 0; m < M; ++m) {
    // Positions that row m sees: [from, to) of the tile.
    const int64_t first = window > 0 ? position[m] - window + 1 - start : 0;
    const int64_t behind = position[m] + 1 - start;
    const int from = first < 0 ? 0 : first > kTile ? kTile : static_cast<int>(first);
    const int to = behind < 0 ? 0 : behind > kTile ? kTile : static_cast<int>(behind);
    if (to > count) count = to;
    float* s = scores + m * kTile;
    F best = f_set(-__builtin_inff());
    const bool plain = from == 0 && to == kTile && op.softcap <= 0 && !tile.k_scale;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      F x = f_load(s + 16 * i);
      if (!plain) {
        if (tile.k_scale) x = f_mul(x, f_load(tile.k_scale + 16 * i));
        if (op.softcap > 0) {
          F cap = f_set(op.softcap);
          x = f_mul(f_set(op.softcap * kLog2e), f_tanh(f_div(x, cap)));
        }
        x = f_range(x, from - 16 * i, to - 16 * i, -__builtin_inff());
        f_store(s + 16 * i, x);
      }
      best = f_max(best, x);
    }
    top[m] = f_top(best);
    was[m] = highest[m];
  }
  F before = f_load(was), now = f_max(before, f_load(top));
  f_store(factor, f_exp2(f_sub(before, now)));
  f_store(top, now);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    highest[m] = top[m];
    F high = f_set(top[m]), sum = f_zero();
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      F e = f_exp2(f_sub(f_load(scores + m * kTile + 16 * i), high));
      sum = f_add(sum, e);
      if (tile.v_scale) e = f_mul(e, f_load(tile.v_scale + 16 * i));
      T::store(p + m * kTile + 16 * i, e);
    }
    f_store(total + 16 * m, f_fma(f_load(total + 16 * m), f_set(factor[m]), sum));
  }

  int64_t column = 0;
  for (; column + 64 <= size; column += 64)
    value_columns<T, M, 4>(p, tile, size, column, count, factor, out);
  for (; column < size; column += 16)
    value_columns<T, M, 1>(p, tile, size, column, count, factor, out);
}

// Rows of a product for R heads: seven where R is a multiple of it, else six.
HR_INLINE int64_t product_rows(int64_t heads) { return heads % 7 == 0 ? 7 : 6; }

HR_INLINE int64_t tokens_of_item(const HrKv& kv) {
  const int64_t heads = kv.heads / kv.kv_heads, group = product_rows(heads);
  int64_t even = 1;  // so many tokens fill whole groups
  while (even * heads % group) ++even;
  const int64_t tokens = kQueryRows / heads;
  return tokens >= even ? tokens / even * even : tokens > 0 ? tokens : 1;
}

template <class T>
struct Scratch {
  TileRoom<T> room;
  float* scores;        // [7][64]
  typename T::Row* p;   // [7][64]
  typename T::Row* q;   // [rows][E], group by group
  typename T::Row* one; // [E]
  float* out;           // [rows][E]
  float* total;         // [rows][16]
  float* highest;       // [rows]
};

// All sizes as if of floats: bf16 takes less.
HR_INLINE int64_t attention_scratch(const HrKv& kv) {
  const int64_t rows = tokens_of_item(kv) * (kv.heads / kv.kv_heads), size = kv.head_dim;
  return 4 * (2 * kTile * size + 2 * kTile + 2 * kRowsA * kTile + size + 2 * rows * size +
              17 * rows) + 64 * 12;
}

template <class T>
HR_INLINE Scratch<T> carve(const HrKv& kv, uint8_t* at) {
  const int64_t rows = tokens_of_item(kv) * (kv.heads / kv.kv_heads), size = kv.head_dim;
  auto take = [&at](int64_t count) {
    uint8_t* found = at;
    at += (4 * count + 63) / 64 * 64;
    return found;
  };
  Scratch<T> s;
  s.room.k = reinterpret_cast<typename T::Cell*>(take(kTile * size));
  s.room.v = reinterpret_cast<typename T::Cell*>(take(kTile * size));
  s.room.k_scale = reinterpret_cast<float*>(take(kTile));
  s.room.v_scale = reinterpret_cast<float*>(take(kTile));
  s.scores = reinterpret_cast<float*>(take(kRowsA * kTile));
  s.p = reinterpret_cast<typename T::Row*>(take(kRowsA * kTile));
  s.q = reinterpret_cast<typename T::Row*>(take(rows * size));
  s.one = reinterpret_cast<typename T::Row*>(take(size));
  s.out = reinterpret_cast<float*>(take(rows * size));
  s.total = reinterpret_cast<float*>(take(16 * rows));
  s.highest = reinterpret_cast<float*>(take(rows));
  return s;
}

// Of which tokens an attention is wanted: result row r is of token r, or of sample_rows[r].
struct Wanted {
  bool all;
  const int64_t* sampled;  // not read where none samples: it may be null then
  int64_t count;

  HR_ALWAYS Wanted(const HrAttention& op, const HrStep& step)
      : all(op.rows == HR_ROWS_N), sampled(step.sample_rows), count(step.r) {}

  HR_ALWAYS int64_t token(int64_t row) const { return all ? row : sampled[row]; }

  // The first row behind `row` that is not of a token below `behind`.
  HR_ALWAYS int64_t end(int64_t row, int64_t behind) const {
    if (all) return behind;
    while (row < count && sampled[row] < behind) ++row;
    return row;
  }
};

// One item: rows [first, last) of entry b, and the query heads of KV head g.
template <class T>
void attend(const HrAttention& op, const HrStep& step, const Wanted& wanted, int b, int g,
            int64_t first, int64_t last, uint8_t* scratch) {
  const HrKv& kv = op.kv;
  const int64_t size = kv.head_dim, heads = kv.heads / kv.kv_heads, most = product_rows(heads);
  const HrGroup& group = step.groups[kv.group];
  const int64_t window = group.window;
  const int32_t* table = group.tables + b * group.table_stride;
  const int64_t length = step.lengths[b];
  Scratch<T> s = carve<T>(kv, scratch);
  const int64_t rows = (last - first) * heads;
  F scale = f_set(op.softcap > 0 ? op.scale : op.scale * kLog2e);
  int64_t positions[kQueryRows];
  for (int64_t i = 0; i < last - first; ++i)
    positions[i] = step.positions[wanted.token(first + i)];
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = wanted.token(first + r / heads);
    const float* q = op.q + token * op.stride + (g * heads + r % heads) * size;
    for (int64_t e = 0; e < size; e += 16) T::store(s.one + e, f_mul(f_load(q + e), scale));
    const int64_t begin = r / most * most, count = rows - begin < most ? rows - begin : most;
    typename T::Row* to = s.q + begin * size + (r - begin) * T::wide;
    for (int64_t e = 0; e < size; e += T::wide, to += count * T::wide)
      memcpy(to, s.one + e, sizeof(*to) * T::wide);
    s.highest[r] = kFloor;
  }
  memset(s.out, 0, static_cast<size_t>(rows * size) * 4);
  memset(s.total, 0, static_cast<size_t>(rows) * 64);
  const int64_t lowest = positions[0], highest = positions[last - first - 1];
  const int64_t begin = window > 0 && lowest >= window ? (lowest - window + 1) / kTile : 0;
  for (int64_t start = begin * kTile; start <= highest; start += kTile) {
    Tile<T> tile;
    open_tile(kv, table, g, start, length, s.room, &tile);
    for (int64_t r = 0; r < rows; r += most) {
      const int m = static_cast<int>(rows - r < most ? rows - r : most);
      if (positions[(r + m - 1) / heads] < start) continue;  // in these rows' future
      if (window > 0 && positions[r / heads] - window + 1 >= start + kTile) continue;  // behind
      int64_t position[kRowsA];
      for (int i = 0; i < m; ++i) position[i] = positions[(r + i) / heads];
#define HR_CASE(M)                                                                            \
  case M:                                                                                     \
    tile_rows<T, M>(op, window, s.q + r * size, position, start, tile, s.scores, s.p,            \
                    s.highest + r, s.total + 16 * r, s.out + r * size);                       \
    break;
      switch (m) { HR_CASE(1) HR_CASE(2) HR_CASE(3) HR_CASE(4) HR_CASE(5) HR_CASE(6) HR_CASE(7) }
#undef HR_CASE
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = first + r / heads, at = (g * heads + r % heads) * size;
    F inverse = f_set(1.0f / f_sum(f_load(s.total + 16 * r)));
    float* out = s.out + r * size;
    for (int64_t e = 0; e < size; e += 16) f_store(out + e, f_mul(f_load(out + e), inverse));
    if (op.y) memcpy(op.y + row * op.y_stride + at, out, static_cast<size_t>(size) * 4);
    if (op.out.six)  // E is a multiple of 32 here: Python saw to it
      quantise_row(out, size, op.out, row, at / 32);
  }
}

void op_attention(const HrAttention& op, const hr::Work& work) {
  const HrStep& step = *work.step;
  const Wanted wanted(op, step);
  const int64_t per_item = tokens_of_item(op.kv);
  int64_t begin = 0, item = work.next();
  for (int g = 0; g < op.kv.kv_heads; ++g) {
    int64_t stop = 0;
    for (int b = 0; b < step.b; ++b) {
      const int64_t start = stop;
      stop = wanted.end(start, step.query_starts[b + 1]);
      const int64_t items = (stop - start + per_item - 1) / per_item;
      for (; item < begin + items; item = work.next()) {
        // The longest first: later tokens see more of the context.
        const int64_t first = start + (items - 1 - (item - begin)) * per_item;
        const int64_t last = first + per_item < stop ? first + per_item : stop;
        if (in_pairs(op.kv.kind)) attend<Pairs>(op, step, wanted, b, g, first, last, work.scratch);
        else attend<Floats>(op, step, wanted, b, g, first, last, work.scratch);
      }
      begin += items;
    }
  }
}

}  // namespace

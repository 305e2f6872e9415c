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
// (tiles.h, tile_rows.h): all rows of an item (items.h) over one tile, which lies in L1 then
// (16 KB), before the next. Scores are sums over E with positions as lanes, results sums over
// positions with E as lanes: no lane is ever summed with another but in the softmax's denominator.
//
// Online softmax (Milakov and Gimelshein 2018) in base 2: queries are multiplied by scale · log2 e
// (by scale alone under a soft cap) when they are packed, and rounded to bf16 where K is. Which
// tiles a row sees and the order of every sum depend on its position alone; positions that it must
// not see get the weight exactly zero, and a tile without a visible one changes nothing. So a
// row's bits are the same in a chunk of 512, in a chunk of one, and in any batch.
//
// K and V come from pages of 2 KB, which no hardware expects: those of the tile after the next are
// fetched into L2 meanwhile, also across the items of a thread.
#pragma once
#include "items.h"
#include "rope.h"
#include "tile_rows.h"

namespace {

template <class T>
struct Scratch {
  TileRoom<T> room[2];
  float* scores;        // [2][7][64]
  typename T::Row* p;   // [7][64]
  typename T::Row* q;   // [rows][E], group by group
  typename T::Row* one; // [E]
  float* out;           // [rows][E]
  float* total;         // [rows][16]
  float* highest;       // [rows][16]: of a group in its first row's
  int64_t* position;    // [rows]
  RowGroup* groups;     // [rows]
  int32_t* begins;      // [rows + 1]: the first group of each KV head and entry
};

// All sizes as if of floats: bf16 takes less.
HR_INLINE int64_t attention_scratch(const HrKv& kv) {
  const int64_t rows = rows_of_item(kv), size = kv.head_dim;
  return 4 * (3 * kTile * size + 4 * kTile + 3 * kRowsA * kTile + size + 2 * rows * size +
              37 * rows + 1) + 64 * 19;
}

template <class T>
HR_INLINE Scratch<T> carve(const HrKv& kv, uint8_t* at) {
  const int64_t rows = rows_of_item(kv), size = kv.head_dim;
  auto take = [&at](int64_t count) {
    uint8_t* found = at;
    at += (4 * count + 63) / 64 * 64;
    return found;
  };
  Scratch<T> s;
  s.room[0].k = s.room[1].k = reinterpret_cast<typename T::Cell*>(take(kTile * size));
  for (TileRoom<T>& room : s.room) {
    room.v = reinterpret_cast<typename T::Cell*>(take(kTile * size));
    room.k_scale = reinterpret_cast<float*>(take(kTile));
    room.v_scale = reinterpret_cast<float*>(take(kTile));
  }
  s.scores = reinterpret_cast<float*>(take(2 * kRowsA * kTile));
  s.p = reinterpret_cast<typename T::Row*>(take(kRowsA * kTile));
  s.q = reinterpret_cast<typename T::Row*>(take(rows * size));
  s.one = reinterpret_cast<typename T::Row*>(take(size));
  s.out = reinterpret_cast<float*>(take(rows * size));
  s.total = reinterpret_cast<float*>(take(16 * rows));
  s.highest = reinterpret_cast<float*>(take(16 * rows));
  s.position = reinterpret_cast<int64_t*>(take(2 * rows));
  s.groups = reinterpret_cast<RowGroup*>(take(2 * rows));
  s.begins = reinterpret_cast<int32_t*>(take(rows + 1));
  return s;
}

// Queries of the item's rows, head by head and entry by entry, in groups of a product.
template <class T>
void take_queries(const HrAttention& op, const HrStep& step, const Wanted& wanted,
                  const Item& item, const Scratch<T>& s) {
  const HrKv& kv = op.kv;
  const int64_t size = kv.head_dim, heads = kv.heads / kv.kv_heads, most = product_rows(heads);
  const F scale = f_set(op.softcap > 0 ? op.scale : op.scale * kLog2e);
  int32_t r = 0, groups = 0, *begin = s.begins;
  for (int g = item.head; g < item.head_end; ++g) {
    int64_t row = item.first;
    for (int b = item.entry; b < item.entry_end; ++b) {
      *begin++ = groups;
      int64_t stop = wanted.end(row, step.query_starts[b + 1]);
      if (stop > item.last) stop = item.last;
      int64_t left = (stop - row) * heads, m = 0, within = 0;
      for (; row < stop; ++row) {
        const int64_t token = wanted.token(row), position = step.positions[token];
        const float* q = op.q + token * op.stride + g * heads * size;
        for (int64_t h = 0; h < heads; ++h, q += size, ++r, ++within) {
          if (within == m) {
            left -= m;
            m = left < most ? left : most;
            within = 0;
            s.groups[groups++] = {r, static_cast<int32_t>(m)};
            f_store(s.highest + 16 * r, f_set(kFloor));
          }
          for (int64_t e = 0; e < size; e += 16) T::store(s.one + e, f_mul(f_load(q + e), scale));
          typename T::Row* to = s.q + (r - within) * size + within * T::wide;
          for (int64_t e = 0; e < size; e += T::wide, to += m * T::wide)
            memcpy(to, s.one + e, sizeof(*to) * T::wide);
          s.position[r] = position;
        }
      }
    }
  }
  *begin = groups;
  memset(s.out, 0, static_cast<size_t>(r * size) * 4);
  memset(s.total, 0, static_cast<size_t>(r) * 64);
}

// What the rows have summed up, over the sum of its weights.
template <class T>
void give_results(const HrAttention& op, const Item& item, const Scratch<T>& s) {
  const int64_t size = op.kv.head_dim, heads = op.kv.heads / op.kv.kv_heads;
  const int64_t rows = (item.head_end - item.head) * (item.last - item.first) * heads;
  HrLane* lanes[kUnitsAtOnce];
  const float* x = s.out;  // what is to be quantised next
  int64_t units = 0, row = item.first, head = item.head * heads;
  for (int64_t r = 0, first; r < rows;) {
    float inverse[16];
    first = r;
    if (rows - r >= 8) {
      F totals[8];
      for (int i = 0; i < 8; ++i) totals[i] = f_load(s.total + 16 * (r + i));
      f_store(inverse, f_div(f_set(1.0f), f_fold<Add>(totals)));
    } else {
      for (int64_t i = 0; i < rows - r; ++i)
        inverse[i] = 1.0f / f_sum(f_load(s.total + 16 * (r + i)));
    }
    for (; r < rows && r < first + 8; ++r) {
      const F by = f_set(inverse[r - first]);
      float* out = s.out + r * size;
      for (int64_t e = 0; e < size; e += 16) f_store(out + e, f_mul(f_load(out + e), by));
      if (op.y) memcpy(op.y + row * op.y_stride + head * size, out, static_cast<size_t>(size) * 4);
      if (op.out.six)  // E is a multiple of 32 here: Python saw to it
        for (int64_t e = 0; e < size; e += 32) {
          lanes[units++] = lane_of(op.out, row, (head * size + e) / 32);
          if (units < kUnitsAtOnce) continue;
          quantise_units(x, lanes, units);
          x += 32 * units;
          units = 0;
        }
      if (++head % heads) continue;
      head -= heads;
      if (++row < item.last) continue;
      row = item.first;
      head += heads;
    }
  }
  quantise_units(x, lanes, units);
}

template <class T>
void attend(const HrAttention& op, const HrStep& step, const Wanted& wanted, const Item& item,
            const Item* behind, uint8_t* scratch) {
  const HrKv& kv = op.kv;
  const HrGroup& group = step.groups[kv.group];
  const int64_t size = kv.head_dim, window = group.window;
  const Scratch<T> s = carve<T>(kv, scratch);
  take_queries<T>(op, step, wanted, item, s);
  const int entries = item.entry_end - item.entry;
  Tile<T> tiles[2], ahead;
  Unit<T> units[2];
  int side = 0;
  Tiles at(op, step, wanted, item), far = at;  // far: two tiles ahead, if need be of the next item
  const auto go_far = [&] {
    far.next();
    if (far.here() || !behind) return;
    far = Tiles(op, step, wanted, *behind);
    behind = nullptr;
  };
  go_far();
  go_far();
  for (int turn = 0; at.here(); at.next(), go_far(), turn ^= 1) {
    Tile<T>& tile = tiles[turn];
    if (units[side ^ 1].m && units[side ^ 1].tile == &tile) finish(&units[side ^ 1], s.p, size);
    const int64_t start = kTile * at.tile;
    open_tile(kv, at.table(), at.head, start, at.length(), s.room[turn], &tile);
    ahead = tile;
    if (far.here()) look_ahead(kv, far.table(), far.head, kTile * far.tile, far.length(), &ahead);
    const int32_t* begins = s.begins + (at.head - item.head) * entries;
    const int32_t first = begins[at.entry - item.entry];
    const int32_t last = begins[at.common() ? entries : at.entry - item.entry + 1];
    for (int32_t i = first; i < last; ++i) {
      const int64_t r = s.groups[i].row;
      const int m = s.groups[i].m;
      const int64_t* position = s.position + r;
      if (position[m - 1] < start) continue;  // in these rows' future
      if (window > 0 && position[0] - window + 1 >= start + kTile) continue;  // behind
      Unit<T>& u = units[side];
      u.m = m;
      u.tile = &tile;
      u.q = s.q + r * size;
      u.highest = s.highest + 16 * r;
      u.total = s.total + 16 * r;
      u.out = s.out + r * size;
      u.scores = s.scores + side * kRowsA * kTile;
      side ^= 1;
      const Tile<T>& next = i + 1 < last ? tile : ahead;
      switch (m) {
#define HR_CASE(M)                                                                             \
  case M:                                                                                      \
    advance<T, M>(&u, &units[side], op.softcap, window, position, start, size, next, s.p);     \
    break;
        HR_ROWS7(HR_CASE)
#undef HR_CASE
      }
    }
  }
  finish(&units[side ^ 1], s.p, size);
  give_results<T>(op, item, s);
}

void op_attention(const HrAttention& op, const hr::Work& work) {
  const HrStep& step = *work.step;
  const Wanted wanted(op, step);
  const auto compute = [&](const Item& item, const Item* behind) {
    if (in_pairs(op.kv.kind)) attend<Pairs>(op, step, wanted, item, behind, work.scratch);
    else attend<Floats>(op, step, wanted, item, behind, work.scratch);
  };
  int64_t mine = work.next(), number = 0;
  Item held{};  // taken, and not yet computed
  bool holds = false;
  each_item(op, step, wanted, work.threads, [&](const Item& item) {
    if (number++ != mine) return;
    if (holds) compute(held, &item);
    holds = item.one_of_many;
    if (holds) held = item;
    else compute(item, nullptr);
    mine = work.next();
  });
  if (holds) compute(held, nullptr);
}

}  // namespace

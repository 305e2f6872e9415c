// Causal attention over the paged KV, decode and prefill in one kernel.
//
// The arithmetic. A query row and KV position cost 2E multiply-adds per query head and read
// 2E values per KV head. Prefill of L tokens: 2 · H · E · L² operations a layer (multiply and add
// counted, half of the square seen); the default model (24 · 14 · 64) at 2,048 tokens 0.180 TFLOP. One
// Zen 4 core gives 117 GFLOP/s in fp32 and 235 with vdpbf16ps (measured): two cores need at least
// 0.77 s and 0.38 s. Beside them stands one exp per score, 0.7 · 10⁹ of them: about ten
// vector operations for sixteen, half of them on other ports: 0.06 to 0.1 s.
// Decode reads the KV: default model, bf16, 12 KiB a position, against 391 MB of weights a token
// (1 % per 325 positions); int8 half of that and 3 % for the scales.
//
// The R = H / G query heads of a KV head are rows of one small product, so K and V are read once
// per KV head, not per query head. Rows go in groups of up to seven over tiles of 64 positions
// (tiles.h, tile_rows.h, code_rows.h): all rows of an item (items.h) over one tile, which lies in
// L1 then (16 KB), before the next. Scores are sums over E with positions as lanes, results sums
// over positions with E as lanes: no lane is ever summed with another but in the softmax's
// denominator.
//
// Online softmax (Milakov and Gimelshein 2018) in base 2: queries are multiplied by scale · log2 e
// (by scale alone under a soft cap) when they are packed, and rounded as K is (codes: code_rows.h).
// Which tiles a row sees and the order of every sum depend on its position alone (and on the last
// one that it sees, of a row whose neighbours see each other, HrStep.reach); positions that it
// must not see get the weight exactly zero, and a tile without a visible one changes nothing. So a
// row's bits are the same in a chunk of 512, in a chunk of one, and in any batch.
//
// Every 512 positions a row's softmax starts anew, and its spans are joined in order (spans.h). So
// several threads can share one sequence's context (parts.h) and a row's bits are the same still.
//
// K and V come from pages of 2 KB, which no hardware expects: those of the tile after the next are
// fetched into L2 meanwhile, also across the items of a thread.
#pragma once
#include "attention_room.h"
#include "entries.h"

namespace {

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
        const int64_t token = wanted.token(row);
        const float* q = op.q + token * op.stride + g * heads * size;
        for (int64_t h = 0; h < heads; ++h, q += size, ++r, ++within) {
          if (within == m) {
            left -= m;
            m = left < most ? left : most;
            within = 0;
            s.groups[groups++] = {r, static_cast<int32_t>(m), -1, 0};
          }
          if constexpr (T::wide == 4) {
            float* plain = s.plain ? s.plain + r * size : nullptr;
            s.query[r] = take_codes(q, size, scale, op.coarse, s.one, plain);
          } else {
            for (int64_t e = 0; e < size; e += 16) T::store(s.one + e, f_mul(f_load(q + e), scale));
          }
          typename T::Row* to = s.q + (r - within) * size + within * T::wide;
          for (int64_t e = 0; e < size; e += T::wide, to += m * T::wide)
            memcpy(to, s.one + e, sizeof(*to) * T::wide);
          s.own[r] = step.positions[token];
          s.last[r] = step.reach[token];
        }
      }
    }
  }
  *begin = groups;
}

// What the rows have summed up, over the sum of its weights. A zero is never −0: whether a span in
// which a row sees nothing was joined to its sums or not could be told by that alone.
void give_results(const HrAttention& op, const Item& item, const Sums& s) {
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
      for (int64_t e = 0; e < size; e += 16) f_store(out + e, f_fma(f_load(out + e), by, f_zero()));
      if (op.kv.kind == HR_K8V4) hadamard(out, size);
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

// Joins the sums of all parts of an item, if this was the last of them to be finished.
template <class T>
bool join_parts(const HrKv& kv, int64_t window, const Item& item, const hr::Work& work,
                const Scratch<T>& s) {
  int64_t* finished = work.counters + 1 + item.cut;
  const int64_t own = (item.to - item.from) / kSpanTiles;
  if (__atomic_add_fetch(finished, own, __ATOMIC_ACQ_REL) < item.spans) return false;
  const int64_t rows = (item.last - item.first) * (kv.heads / kv.kv_heads);
  for (int32_t i = 0; i < s.begins[1]; ++i) {
    const int32_t row = s.groups[i].row, m = s.groups[i].m;
    const int64_t behind = item.first_span + item.spans;
    const Sums past = s.sums[0].from(row, kv.head_dim);
    bool some = false;
    for (int64_t span = item.first_span; span < behind; ++span) {
      if (s.last[row + m - 1] < kSpan * span) break;  // in these rows' future
      if (window && first_seen(s.own[row], window) >= kSpan * (span + 1)) continue;  // behind
      const Sums kept = kept_sums(kv, item, work.shared, rows, span).from(row, kv.head_dim);
      if (some) join(past, past, kept, m, kv.head_dim);
      else copy(past, kept, m, kv.head_dim);
      some = true;
    }
  }
  return true;
}

// The weight of each head's sink, to what the rows' weights sum up to: it takes its share and gives
// nothing (Xiao et al. 2023, with a learnt score in place of a token). `joined`: of an item in parts.
template <class T>
void add_sinks(const HrAttention& op, const Item& item, bool joined, const Scratch<T>& s) {
  const int64_t heads = op.kv.heads / op.kv.kv_heads, each = (item.last - item.first) * heads;
  const int groups = s.begins[(item.head_end - item.head) * (item.entry_end - item.entry)];
  for (int32_t i = 0; i < groups; ++i) {
    const RowGroup& of = s.groups[i];
    // Where the last `leave` has left the maxima of all spans.
    const float* highest = s.highest[joined ? 0 : (of.spans - 1) / 2 * 2 % 3] + 16 * of.row;
    float above[16] = {}, weight[16];
    for (int32_t m = 0; m < of.m; ++m) {
      const int64_t row = of.row + m;
      above[m] = op.sinks[(item.head + row / each) * heads + row % heads] * kLog2e;
    }
    const F x = f_sub(f_load(above), f_load(highest));
    f_store(above, x);
    f_store(weight, f_exp2<5>(f_min(x, f_sub(f_zero(), x))));
    for (int32_t m = 0; m < of.m; ++m)
      s.sums[0].total[16 * (of.row + m)] += above[m] > 0 ? 1.0f / weight[m] : weight[m];
  }
}

// kCoarse: of KV in codes, as `op.coarse` says.
template <class T, bool kCoarse>
void attend(const HrAttention& op, const HrStep& step, const Wanted& wanted, const Item& item,
            const Item* behind, const hr::Work& work) {
  const HrKv& kv = op.kv;
  const int64_t size = kv.head_dim, window = window_of(op, step);
  const Scratch<T> s = carve<T>(kv, work.scratch);
  take_queries<T>(op, step, wanted, item, s);
  const bool part = item.cut >= 0;
  const int entries = item.entry_end - item.entry;
  const int64_t rows = (item.last - item.first) * (kv.heads / kv.kv_heads);
  // A product's rows have gone through their span.
  const auto leave = [&](const RowGroup& of, bool last) {
    const int32_t number = of.spans - 1;
    const Sums span = sums_of(s, number, of.row, size);
    if (part) {
      copy(kept_sums(kv, item, work.shared, rows, of.span).from(of.row, size), span, of.m, size);
    } else if (number > 0) {
      const Sums past = sums_of(s, number - 1, of.row, size);
      join(last && number % 2 ? past : span, past, span, of.m, size);
    }
  };
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
    if constexpr (T::wide != 4)
      if (units[side ^ 1].m && units[side ^ 1].tile == &tile) finish(&units[side ^ 1], s.p, size);
    const int64_t start = kTile * at.tile;
    const auto span = static_cast<int32_t>(at.tile / kSpanTiles);
    open_tile(kv, at.table(), at.head, start, at.length(), s.room[turn], &tile);
    ahead = tile;
    if (far.here()) look_ahead(kv, far.table(), far.head, kTile * far.tile, far.length(), &ahead);
    const int32_t* begins = s.begins + (at.head - item.head) * entries;
    const int32_t first = begins[at.entry - item.entry];
    const int32_t last = begins[at.common() ? entries : at.entry - item.entry + 1];
    for (int32_t i = first; i < last; ++i) {
      const int64_t r = s.groups[i].row;
      const int m = s.groups[i].m;
      const Places places = {s.own + r, s.last + r};
      if (places.last[m - 1] < start) continue;  // in these rows' future
      if (window && first_seen(places.own[0], window) >= start + kTile) continue;  // behind
      RowGroup& of = s.groups[i];
      const bool enters = span != of.span, leaves = enters && of.spans;
      // Codes are summed up at once, into the room of the span before the last, which has to leave.
      if (T::wide == 4 && leaves) leave(of, false);
      const Sums now = sums_of(s, enters ? of.spans : of.spans - 1, r, size);
      if (enters) f_store(now.highest, f_set(kFloor));
      Unit<T>& u = units[side];
      u.m = m;
      u.fresh = enters;
      u.tile = &tile;
      u.q = s.q + r * size;
      u.query = s.query + r;
      u.highest = now.highest;
      u.total = now.total;
      u.out = now.out;
      u.scores = s.scores + side * kRowsA * kTile;
      side ^= 1;
      const Tile<T>& next = i + 1 < last ? tile : ahead;
      switch (m) {
#define HR_CASE(M)                                                                             \
  case M:                                                                                      \
    if constexpr (T::wide == 4)                                                                \
      code_rows<M, kCoarse>(&u, op.softcap, window, places, start, size, next, s.p);           \
    else                                                                                       \
      advance<T, M>(&u, &units[side], op.softcap, window, places, start, size, next, s.p);     \
    break;
        HR_ROWS7(HR_CASE)
#undef HR_CASE
      }
      if (!enters) continue;
      // The span before is summed up now, and of this one there are the maxima alone.
      if (T::wide != 4 && leaves) leave(of, false);
      of.span = span;
      ++of.spans;
    }
  }
  if constexpr (T::wide != 4) finish(&units[side ^ 1], s.p, size);
  for (int32_t i = 0; i < s.begins[(item.head_end - item.head) * entries]; ++i)
    if (s.groups[i].spans) leave(s.groups[i], true);
  if (part && !join_parts(kv, window, item, work, s)) return;
  if (op.sinks) add_sinks(op, item, part, s);
  give_results(op, item, s.sums[0]);
}

template <class T, bool kCoarse = false>
HR_INLINE void attention(const HrAttention& op, const hr::Work& work) {
  const HrStep& step = seen_by(op, *work.step);
  const Wanted wanted(op, step);
  const auto compute = [&](const Item& item, const Item* behind) {
    attend<T, kCoarse>(op, step, wanted, item, behind, work);
  };
  int64_t mine = work.next(), number = 0;
  Item held{};  // taken, and not yet computed
  bool holds = false;
  each_part(op, step, wanted, work.threads, [&](const Item& item) {
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

// The work space of attention: what a thread needs for an item, and where sums wait to be joined.
#pragma once
#include "code_rows.h"
#include "parts.h"

namespace {

template <class T>
struct Scratch {
  TileRoom<T> room[2];
  float* scores;        // [2][7][64]
  typename T::Row* p;   // [7][64]
  typename T::Row* q;   // [rows][E], group by group
  typename T::Row* one; // [E]
  QueryCodes* query;    // [rows], of queries in codes
  float* plain;         // [rows][E], where keys are kept without a bias
  Sums sums[2];         // over the span that a row is in, and over those before: in turns
  float* highest[3];    // the maxima of those, and of a span that begins before they are joined
  int64_t *own, *last;  // [rows]: `Places`
  RowGroup* groups;     // [rows]
  int32_t* begins;      // [rows + 1]: the first group of each KV head and entry
};

// All sizes as if of floats: bf16 and codes take less.
HR_INLINE int64_t attention_scratch(const HrKv& kv) {
  const int64_t rows = rows_of_item(kv), size = kv.head_dim;
  const int64_t plain = kv.bias ? rows * size : 0;
  return 4 * (3 * kTile * size + 2 * floats_beside(size) + 3 * kRowsA * kTile + size +
              3 * rows * size + plain + 93 * rows + 1) + 64 * 21;
}

// The step as an attention sees it.
HR_INLINE const HrStep& seen_by(const HrAttention& op, const HrStep& step) {
  return op.across ? *static_cast<const HrStep*>(step.across) : step;
}

HR_INLINE hr::Room attention_room(const HrAttention& op, const HrStep& step, int threads) {
  return {attention_scratch(op.kv), 4 * floats_kept(op, seen_by(op, step), threads)};
}

template <class T>
HR_INLINE Scratch<T> carve(const HrKv& kv, uint8_t* at) {
  const int64_t rows = rows_of_item(kv), size = kv.head_dim;
  auto take = [&at](int64_t count) {
    uint8_t* found = at;
    at += (4 * count + 63) / 64 * 64;
    return found;
  };
  const auto floats = [&take](int64_t count) { return reinterpret_cast<float*>(take(count)); };
  Scratch<T> s;
  s.room[0].k = s.room[1].k = reinterpret_cast<typename T::Cell*>(take(kTile * size));
  for (TileRoom<T>& room : s.room) {
    room.v = reinterpret_cast<typename T::Cell*>(take(kTile * size));
    room.beside = floats(floats_beside(size));
  }
  s.scores = floats(2 * kRowsA * kTile);
  s.p = reinterpret_cast<typename T::Row*>(take(kRowsA * kTile));
  s.q = reinterpret_cast<typename T::Row*>(take(rows * size));
  s.one = reinterpret_cast<typename T::Row*>(take(size));
  s.query = reinterpret_cast<QueryCodes*>(take(4 * rows));
  s.plain = kv.bias ? floats(rows * size) : nullptr;
  for (float*& highest : s.highest) highest = floats(16 * rows);
  for (Sums& sums : s.sums) sums = {s.highest[0], floats(16 * rows), floats(rows * size)};
  s.own = reinterpret_cast<int64_t*>(take(2 * rows));
  s.last = reinterpret_cast<int64_t*>(take(2 * rows));
  s.groups = reinterpret_cast<RowGroup*>(take(4 * rows));
  s.begins = reinterpret_cast<int32_t*>(take(rows + 1));
  return s;
}

// The sums of rows from `row` on over span number `count` of those that they see.
template <class T>
HR_INLINE Sums sums_of(const Scratch<T>& s, int32_t count, int64_t row, int64_t size) {
  Sums sums = s.sums[count & 1].from(row, size);
  sums.highest = s.highest[count % 3] + 16 * row;
  return sums;
}

// Where a part of an item leaves the sums of `rows` rows over a span.
HR_INLINE Sums kept_sums(const HrKv& kv, const Item& item, uint8_t* shared, int64_t rows,
                         int64_t span) {
  float* all = reinterpret_cast<float*>(shared) + item.kept;
  return sums_at(all + (span - item.first_span) * floats_of_span(kv, item), rows);
}

}  // namespace

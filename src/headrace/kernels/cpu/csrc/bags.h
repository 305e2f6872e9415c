// Embedding bags: weighted sums or means of rows of tables, next to each other.
//
// A sum is taken from zero, id by id as they come, each product rounded before it is added: its bits
// depend on its own bag alone, and are those of the interpreter (kernels/ranked.py). Rows lie
// anywhere in tables that no cache holds, so the row after next is asked for while one is added.
#pragma once
#include "pack.h"
#include "tails.h"
#include "work.h"

namespace {

constexpr int64_t kBagColumns = 128;  // expanded at a time: rows of other types than F32
constexpr int64_t kBagAhead = 4;      // ids between the one that is read and the one asked for
constexpr int64_t kBagLines = 4;      // cache lines of a row that are asked for

HR_INLINE void fetch_row(const HrTable& t, int64_t id) {
  const uint8_t* row = t.data + id * t.row_bytes;
  for (int64_t line = 0; line < kBagLines && 64 * line < t.row_bytes; ++line)
    __builtin_prefetch(row + 64 * line);
}

// y += weight · row, in at most kBagColumns columns from `from` on.
HR_INLINE void add_row(const HrTable& t, int64_t id, float weight, int64_t from, int64_t size,
                       float* y) {
  const uint8_t* row = t.data + id * t.row_bytes;
  alignas(64) float x[kBagColumns];
  const float* numbers = x;
  if (t.kind == HR_F32) {
    numbers = reinterpret_cast<const float*>(row) + from;
  } else if (t.kind == HR_I8) {
    const float scale = t.scales[id];
    for (int64_t i = 0; i < size; ++i)
      x[i] = static_cast<float>(static_cast<int32_t>(row[from + i]) - 128) * scale;
  } else {
    hr::expand_row(t.kind, row + 2 * from, size, 1.0f, x);
  }
  const F w = f_set(weight);
  for (int64_t i = 0; i < size; i += 16)
    f_store_tail(y + i, f_add(f_tail(y + i, size - i), f_mul(f_tail(numbers + i, size - i), w)),
                 size - i);
}

void bag_of(const HrTable& t, const HrBag& bag, int64_t which, float* y) {
  const int64_t first = bag.starts[which], last = bag.starts[which + 1];
  for (int64_t from = 0; from < t.size; from += kBagColumns) {
    const int64_t size = t.size - from < kBagColumns ? t.size - from : kBagColumns;
    float* part = y + from;
    memset(part, 0, sizeof(float) * size);
    for (int64_t i = first; i < last; ++i) {
      if (i + kBagAhead < last) fetch_row(t, bag.ids[i + kBagAhead]);
      add_row(t, bag.ids[i], bag.weights ? bag.weights[i] : 1.0f, from, size, part);
    }
    if (t.mean && last - first > 1)
      for (int64_t i = 0; i < size; ++i) part[i] /= static_cast<float>(last - first);
  }
}

void op_bags(const HrBags& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.rows(op.rows), &first, &last);
  const HrStep& step = *work.step;
  const float* numbers = op.rows == HR_ROWS_N   ? step.numbers
                         : op.rows == HR_ROWS_R ? step.times
                                                : step.texts;
  for (int64_t n = first; n < last; ++n) {
    float* y = op.y + n * op.y_stride;
    if (op.x) memcpy(y, op.x + n * op.x_stride, sizeof(float) * op.size);
    if (op.numbers)
      memcpy(y + op.size, numbers + n * op.numbers, sizeof(float) * op.numbers);
    for (int32_t at = 0; at < op.count; ++at) {
      const HrTable& t = op.tables[at];
      const HrBag& bag = work.step->bags[t.bag];
      const int64_t which = bag.of ? bag.of[n] : n;
      if (bag.of && n > first && bag.of[n - 1] == which) {
        memcpy(y + t.first, y - op.y_stride + t.first, sizeof(float) * t.size);
        continue;
      }
      if (n + 1 < last) {  // The first row of the next bag.
        const int64_t next = bag.of ? bag.of[n + 1] : n + 1;
        if (bag.starts[next] < bag.starts[next + 1]) fetch_row(t, bag.ids[bag.starts[next]]);
      }
      bag_of(t, bag, which, y + t.first);
    }
  }
}

}  // namespace

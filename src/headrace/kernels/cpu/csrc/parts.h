// Items cut along their context, where whole ones would leave threads idle.
//
// A lone sequence is as many items as it has KV heads. Where that is uneven over the threads (the
// slowest would take more than 5/4 of an even share), items are cut into runs of whole spans; each
// run leaves its spans' sums in memory that all threads see, and whoever finishes an item's last
// run joins them in order. No thread waits for another. Spans are joined in that order by one
// thread too, so nothing here changes what a row computes.
#pragma once
#include "items.h"
#include "spans.h"

namespace {

constexpr int kPartsEach = 4;            // parts for each thread, about, where items are uneven
constexpr int kManyEach = 4;             // so many whole items for each thread come out even
constexpr int64_t kMostKept = 16 << 20;  // floats of sums that wait to be joined, about

// Tiles that some row of an item sees: of its first entry, where it has several.
struct Seen {
  int64_t first, behind;

  HR_ALWAYS Seen(const HrAttention& op, const HrStep& step, const Wanted& wanted,
                 const Item& item) {
    int64_t last = item.last;
    if (item.entry_end > item.entry + 1)
      last = wanted.end(item.first, step.query_starts[item.entry + 1]);
    const int64_t lowest = step.positions[wanted.token(item.first)];
    const int64_t window = window_of(op, step);
    const int64_t seen = window ? first_seen(lowest, window) : 0;
    first = seen > 0 ? seen / kTile : 0;
    behind = step.reach[wanted.token(last - 1)] / kTile + 1;
  }
};

// What a tile of one KV head costs the rows of an item: its reading, and each product.
HR_INLINE int64_t cost_of_tile(const HrKv& kv, const Item& item) {
  const int64_t heads = kv.heads / kv.kv_heads, most = product_rows(heads);
  return 1 + ((item.last - item.first) * heads + most - 1) / most;
}

// Floats that the sums of an item's rows are, of one KV head and span.
HR_INLINE int64_t floats_of_span(const HrKv& kv, const Item& item) {
  return (item.last - item.first) * (kv.heads / kv.kv_heads) * (kv.head_dim + kBesideOut);
}

// About what a part is to cost; 0: every item stays whole.
HR_INLINE int64_t cost_of_part(const HrAttention& op, const HrStep& step, const Wanted& wanted,
                               int threads) {
  if (threads == 1) return 0;
  const int64_t window = step.groups[op.kv.group].window;
  int64_t longest = 0, all = 0;
  for (int b = 0; b < step.b; ++b) {
    int64_t length = step.lengths[b];
    if (window > 0 && length > window + kTile) length = window + kTile;
    if (length > longest) longest = length;
    all += length;
  }
  if (longest <= kSpan) return 0;
  all *= op.kv.kv_heads;
  const bool many = step.b * op.kv.kv_heads >= kManyEach * threads;
  if (many && longest * threads <= all) return 0;
  int64_t items = 0, sum = 0, slowest = 0;
  each_item(op, step, wanted, threads, [&](const Item& item) {
    const Seen seen(op, step, wanted, item);
    const int64_t tiles = (seen.behind - seen.first) * (item.head_end - item.head);
    const int64_t cost = tiles * cost_of_tile(op.kv, item);
    ++items;
    sum += cost;
    if (cost > slowest) slowest = cost;
  });
  if (items == 0) return 0;
  const bool even = threads % items == 0 && 10 * slowest * items <= 11 * sum;
  if (items < kManyEach * threads) {
    const int64_t rounds = (items + threads - 1) / threads;
    if (rounds * sum / items > slowest) slowest = rounds * sum / items;
  }
  if (4 * slowest * threads <= 5 * sum) return 0;
  // Each part begins cold, so even items are cut into one for each thread and no more.
  return sum / (even ? threads : kPartsEach * threads) + 1;
}

// Every item of the step to `take`, whole or in parts, in an order that is the same for all
// threads.
template <class Take>
HR_INLINE void each_part(const HrAttention& op, const HrStep& step, const Wanted& wanted,
                         int threads, Take take) {
  const int64_t share = cost_of_part(op, step, wanted, threads);
  if (share == 0) return each_item(op, step, wanted, threads, take);
  int64_t kept = 0;
  int32_t cut = 0;
  each_item(op, step, wanted, threads, [&](const Item& item) {
    if (item.entry_end > item.entry + 1) return take(item);
    const Seen seen(op, step, wanted, item);
    const int64_t first = seen.first / kSpanTiles;
    const int64_t behind = (seen.behind - 1) / kSpanTiles + 1;
    const int64_t cost = (seen.behind - seen.first) * cost_of_tile(op.kv, item);
    const int64_t parts = (cost + share - 1) / share, spans = behind - first;
    const int64_t run = (spans + parts - 1) / parts;  // spans of a part
    const int64_t more = cut + item.head_end - item.head;
    if (spans <= run || more >= hr::kCounterStride * threads || kept > kMostKept)
      return take(item);
    for (int g = item.head; g < item.head_end; ++g, ++cut) {
      Item part = item;
      part.head = g;
      part.head_end = g + 1;
      part.common = 0;
      part.one_of_many = false;
      part.cut = cut;
      part.first_span = first;
      part.spans = spans;
      part.kept = kept;
      kept += spans * floats_of_span(op.kv, item);
      for (int64_t at = first; at < behind; at += run) {
        part.from = at * kSpanTiles;
        part.to = (at + run < behind ? at + run : behind) * kSpanTiles;
        take(part);
      }
    }
  });
}

// Floats that all threads share for it.
HR_INLINE int64_t floats_kept(const HrAttention& op, const HrStep& step, int threads) {
  const Wanted wanted(op, step);
  if (cost_of_part(op, step, wanted, threads) == 0) return 0;
  int64_t kept = 0;
  each_part(op, step, wanted, threads, [&](const Item& item) {
    if (item.cut < 0) return;
    const int64_t behind = item.kept + item.spans * floats_of_span(op.kv, item);
    if (behind > kept) kept = behind;
  });
  return kept;
}

}  // namespace

// What a step's attention is cut into: items of rows, entries and KV heads, one to a thread.
//
// A prompt's chunk is cut into items of about 96 query rows of one KV head: K and V are read once
// for all of them. An entry of few rows is one item for all KV heads, which lie side by side in a
// block, or an item for each where there are few entries. Entries of few rows, one after the other,
// whose block tables begin alike go through the tiles of those blocks together, as rows of one
// prompt would, and through the rest one by one (FlashInfer's cascade, vLLM's shared prefix; here
// no sum is merged, for a row keeps its sums from tile to tile). It saves the reading of K and V
// from L2 and the decoding of int8, not products.
//
// Which rows share an item changes nothing in what a row computes.
#pragma once
#include "tiles.h"

namespace {

constexpr int kQueryRows = 96;    // query rows of an item, about
constexpr int kItemsEach = 2;     // of those that share a prefix: for each thread, at least
constexpr int kEntriesEach = 4;   // an entry is one item where there are so many for each thread

// Rows of a product for R heads: seven where R is a multiple of it, else six.
HR_INLINE int64_t product_rows(int64_t heads) { return heads % 7 == 0 ? 7 : 6; }

// Tokens of an item of one KV head.
HR_INLINE int64_t tokens_of_item(const HrKv& kv) {
  const int64_t heads = kv.heads / kv.kv_heads, group = product_rows(heads);
  int64_t even = 1;  // so many tokens fill whole groups
  while (even * heads % group) ++even;
  const int64_t tokens = kQueryRows / heads;
  return tokens >= even ? tokens / even * even : tokens > 0 ? tokens : 1;
}

// Query rows of an item at most.
HR_INLINE int64_t rows_of_item(const HrKv& kv) {
  const int64_t heads = kv.heads / kv.kv_heads;
  return heads > kQueryRows ? heads : kQueryRows;
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

struct RowGroup {  // rows of one product
  int32_t row, m;
  int32_t span;    // that they are in
  int32_t spans;   // that they have been in, this one included
};

struct Item {
  int entry, entry_end;
  int head, head_end;    // KV heads
  int64_t first, last;   // result rows, one after the other
  int64_t common;        // so many tiles at the beginning are of blocks that all entries share
  bool one_of_many;      // a thread may take its next item first, to fetch what that reads
  // An item that was cut along its context (parts.h) is the tiles [from, to), whole spans.
  int64_t from = 0, to = INT64_MAX;
  int32_t cut = -1;      // number of what it is a part of, −1: it is whole
  int64_t first_span = 0, spans = 0;  // of all parts
  int64_t kept = 0;      // float of the shared room where their sums begin
};

// The tiles of an item in the order in which it reads them, KV head by KV head each: the common
// ones for all entries, then what else each entry sees.
struct Tiles {
  int entry, head;
  int64_t tile;

  HR_ALWAYS Tiles(const HrAttention& op, const HrStep& step, const Wanted& wanted,
                  const Item& item)
      : entry(item.entry), head(item.head), tile(0), item_(&item), step_(&step),
        group_(&step.groups[op.kv.group]), wanted_(&wanted), window_(window_of(op, step)),
        row_(item.first) {
    if (item.common > 0) end_ = item.common, common_ = true;
    else see();
  }
  HR_ALWAYS bool here() const { return entry < item_->entry_end; }
  HR_ALWAYS bool common() const { return common_; }  // of all entries
  HR_ALWAYS const int32_t* table() const { return group_->tables + entry * group_->table_stride; }
  HR_ALWAYS int64_t length() const { return step_->lengths[entry]; }
  void next() {
    if (!here() || ++head < item_->head_end) return;
    head = item_->head;
    if (++tile < end_) return;
    if (common_) common_ = false;
    else ++entry;
    if (here()) see();
  }

 private:
  // Tiles that the rows of this entry see.
  void see() {
    int64_t stop = wanted_->end(row_, step_->query_starts[entry + 1]);
    if (stop > item_->last) stop = item_->last;
    const int64_t lowest = step_->positions[wanted_->token(row_)];
    const int64_t highest = step_->reach[wanted_->token(stop - 1)];
    row_ = stop;
    end_ = highest / kTile + 1;
    tile = item_->common;
    const int64_t first = window_ ? first_seen(lowest, window_) : 0;
    if (first > 0) tile = first / kTile;
    if (tile < item_->from) tile = item_->from;
    if (end_ > item_->to) end_ = item_->to;
  }

  const Item* item_;
  const HrStep* step_;
  const HrGroup* group_;
  const Wanted* wanted_;
  int64_t window_;
  int64_t row_, end_ = 0;
  bool common_ = false;
};

// Tiles at the beginning of two entries that lie in the same blocks, `most` at most.
HR_INLINE int64_t common_tiles(const HrKv& kv, const int32_t* one, const int32_t* other,
                               int64_t most) {
  const int64_t blocks = most * kTile / kv.block_size;
  int64_t same = 0;
  while (same < blocks && one[same] == other[same]) ++same;
  return same * kv.block_size / kTile;
}

// Every item of the step to `take`, in an order that is the same for all threads.
template <class Take>
HR_INLINE void each_item(const HrAttention& op, const HrStep& step, const Wanted& wanted,
                         int threads, Take take) {
  const HrKv& kv = op.kv;
  const HrGroup& group = step.groups[kv.group];
  const int64_t heads = kv.heads / kv.kv_heads, most = tokens_of_item(kv);
  const bool many = step.b >= kEntriesEach * threads;
  int64_t start = 0, stop = 0;
  for (int b = 0, after; b < step.b; b = after, start = stop) {
    after = b + 1;
    stop = wanted.end(start, step.query_starts[after]);
    if (stop == start) continue;
    if (2 * (stop - start) > most) {  // a chunk of a prompt
      const int64_t items = (stop - start + most - 1) / most;
      for (int g = 0; g < kv.kv_heads; ++g)
        for (int64_t i = items; i--;) {  // the longest first: later tokens see more of the context
          const int64_t first = start + i * most, last = first + most < stop ? first + most : stop;
          take(Item{b, after, g, g + 1, first, last, 0, false});
        }
      continue;
    }
    // Entries that share its first tiles.
    const int32_t* table = group.tables + b * group.table_stride;
    int64_t common = (step.positions[wanted.token(start)] + 1) / kTile, widest = stop - start;
    if (group.window > 0) common = 0;
    while (common > 0 && after < step.b) {
      const int64_t end = wanted.end(stop, step.query_starts[after + 1]);
      if (end == stop || 2 * (end - stop) > most) break;
      int64_t seen = (step.positions[wanted.token(stop)] + 1) / kTile;
      if (seen > common) seen = common;
      seen = common_tiles(kv, table, group.tables + after * group.table_stride, seen);
      if (seen == 0 || (after > b + 1 && 2 * seen < common)) break;
      common = seen;
      if (end - stop > widest) widest = end - stop;
      stop = end;
      ++after;
    }
    if (after == b + 1) {  // none does
      int64_t wide = many ? kQueryRows / ((stop - start) * heads) : 1;
      if (wide < 1) wide = 1;
      for (int g = 0; g < kv.kv_heads; g += static_cast<int>(wide)) {
        const int64_t behind = g + wide < kv.kv_heads ? g + wide : kv.kv_heads;
        take(Item{b, after, g, static_cast<int>(behind), start, stop, 0, many});
      }
      continue;
    }
    const int64_t wish = (kItemsEach * threads + kv.kv_heads - 1) / kv.kv_heads;
    int64_t tokens = (stop - start + wish - 1) / wish;
    if (tokens < widest) tokens = widest;
    if (tokens > most) tokens = most;
    for (int from = b; from < after;) {
      int to = from;
      int64_t last = start;
      for (int64_t end = start; to < after; ++to) {
        end = wanted.end(end, step.query_starts[to + 1]);
        if (end - start > tokens) break;
        last = end;
      }
      for (int g = 0; g < kv.kv_heads; ++g)
        take(Item{from, to, g, g + 1, start, last, common, false});
      from = to;
      start = last;
    }
  }
}

}  // namespace

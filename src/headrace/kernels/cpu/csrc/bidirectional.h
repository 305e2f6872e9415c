// Attention of an encoder: every token sees all tokens of its own entry, before and behind it, or of
// its own window of the entry. Below, an entry is either. Across, its queries see an entry of others'
// keys and values.
//
// y = softmax(scale · q · kᵀ + bias) · v, per entry and head, in fp32: q, k and v are of this very step,
// so there are no pages and no masks. Work is cut into items of one head of one entry and up to
// kQueries of its queries. A thread first lays the head's keys and values out as panels, with
// positions as lanes for the keys and numbers of the head as lanes for the values: then both
// products are the tiles of chain.h. It costs 2 · L · E moves beside 2 · L · E · queries / 16 fma.
//
// Scores of a tile of queries lie in work space, L numbers a row. Their order: the dot over E in one
// chain; the maximum; exponentials, summed in sixteen lanes over the positions and then over the
// lanes; the sum over positions in one chain, divided at the end. Nothing of it depends on which
// other queries are in the tile, or on which other entries are in the step.
#pragma once
#include "chain.h"
#include "entries.h"
#include "tails.h"
#include "work.h"

namespace {

constexpr int64_t kQueries = 16 * kTallest;  // of an item, at most

HR_INLINE int64_t up16(int64_t n) { return (n + 15) / 16 * 16; }

HR_INLINE int64_t parts_of(int64_t length) { return (length + kQueries - 1) / kQueries; }

// Tokens that see each other: entries of the step, or its windows.
struct Runs {
  const int32_t* bounds;  // [count + 1]
  int64_t count;
};

HR_INLINE Runs runs_of(const HrBidirectional& op, const HrStep& step) {
  if (op.windowed) return {step.windows, step.window_count};
  return {step.query_starts, step.b};
}

HR_INLINE const int32_t* keys_of(const HrBidirectional& op, const HrStep& step, const Runs& runs) {
  return op.kv ? step.text_starts : runs.bounds;
}

// One head of one entry, laid out for a thread: its part of the work space.
struct OneHead {
  int64_t length, wide;  // keys, and those with the last panel's padding
  const float* bias;     // of the entry's first query on its first key
  float* keys;           // [wide / 16][E][16]
  float* values;         // [E / 16, upwards][wide][16]
  float* scores;         // [kTallest][wide]
  float* mixed;          // [kTallest][E, upwards]
};

void lay_out(const HrBidirectional& op, const float* k, const float* v, int64_t stride,
             const OneHead& head) {
  const int64_t size = op.head_dim;
  for (int64_t first = 0; first < head.wide; first += 16) {
    float* panel = head.keys + first * size;
    const int64_t left = head.length - first < 16 ? head.length - first : 16;
    for (int64_t i = 0; i < 16; ++i) {
      const float* row = k + (first + i) * stride;
      for (int64_t e = 0; e < size; ++e) panel[16 * e + i] = i < left ? row[e] : 0.0f;
    }
  }
  for (int64_t e = 0; e < size; e += 16) {
    float* panel = head.values + e * head.wide;
    for (int64_t p = 0; p < head.length; ++p)
      f_store(panel + 16 * p, f_tail(v + p * stride + e, size - e));
  }
}

// Scores to exponentials; → one over their sum.
HR_INLINE float soften(float* scores, float scale, const float* bias, const OneHead& head) {
  const F least = f_set(-__builtin_inff()), by = f_set(scale);
  F highest = least, sum = f_zero();
  for (int64_t p = 0; p < head.wide; p += 16) {
    F s = f_mul(f_load(scores + p), by);
    if (bias) s = f_add(s, f_load(bias + p));
    f_store(scores + p, s);
    if (p + 16 > head.length)
      for (int64_t i = head.length; i < head.wide; ++i) scores[i] = -__builtin_inff();
    highest = f_max(highest, f_load(scores + p));
  }
  const F peak = f_set(f_highest(highest));
  for (int64_t p = 0; p < head.wide; p += 16) {
    const F e = f_exp(f_sub(f_load(scores + p), peak));
    f_store(scores + p, e);
    sum = f_add(sum, e);
  }
  return 1.0f / f_sum(sum);
}

// `rows` queries of a head, from the entry's query `at` on.
void attend_tile(const HrBidirectional& op, int64_t rows, int64_t at, const float* q, float* y,
                 const OneHead& head) {
  const int64_t size = op.head_dim, wide = head.wide, all = up16(size);
  ChainTile dots{q, op.stride, reinterpret_cast<const uint8_t*>(head.keys), 64 * size, size,
            head.scores, wide};
  int64_t p = 0;
  for (; p + 16 * kPair <= wide; p += 16 * kPair) {
    chains<HR_F32, kPair>(rows, dots);
    dots.w += kPair * dots.panel;
    dots.y += kPair * 16;
  }
  if (p < wide) chains<HR_F32, 1>(rows, dots);
  float share[kTallest];
  for (int64_t m = 0; m < rows; ++m)
    share[m] = soften(head.scores + m * wide, op.scale, head.bias ? head.bias - at - m : nullptr,
                      head);
  ChainTile mix{head.scores, wide, reinterpret_cast<const uint8_t*>(head.values), 64 * wide,
           head.length, head.mixed, all};
  int64_t e = 0;
  for (; e + 16 * kPair <= all; e += 16 * kPair) {
    chains<HR_F32, kPair>(rows, mix);
    mix.w += kPair * mix.panel;
    mix.y += kPair * 16;
  }
  if (e < all) chains<HR_F32, 1>(rows, mix);
  for (int64_t m = 0; m < rows; ++m)
    for (e = 0; e < size; e += 16)
      f_store_tail(y + m * op.y_stride + e,
                   f_mul(f_load(head.mixed + m * all + e), f_set(share[m])), size - e);
}

}  // namespace

namespace hr::HR_NAME {

Room bidirectional_room(const HrBidirectional& op, const HrStep& step) {
  int64_t longest = 0;
  const Runs runs = runs_of(op, step);
  const int32_t* keys = keys_of(op, step, runs);
  for (int64_t b = 0; b < runs.count; ++b) {
    const int64_t length = keys[b + 1] - keys[b];
    if (length > longest) longest = length;
  }
  const int64_t wide = up16(longest);
  const int64_t size = up16(op.head_dim);
  return {4 * (wide * (op.head_dim + size + kTallest) + kTallest * size), 0};
}

void bidirectional(const HrBidirectional& op, const Work& work) {
  const Runs runs = runs_of(op, *work.step);
  const int32_t* keys = keys_of(op, *work.step, runs);
  const int64_t size = op.head_dim, width = op.heads * size;
  int64_t before = 0, laid = -1;  // items of the entries before `b`; head that is laid out
  int64_t b = 0;
  OneHead head{};
  for (int64_t item = work.next();; item = work.next()) {
    int64_t start = 0, queries = 0, parts = 0;
    for (; b < runs.count; ++b) {  // items only grow: no entry is looked at twice
      start = runs.bounds[b];
      queries = runs.bounds[b + 1] - start;
      head.length = keys[b + 1] - keys[b];
      parts = parts_of(queries);
      if (item < before + op.heads * parts) break;
      before += op.heads * parts;
      laid = -1;
    }
    if (b == runs.count) return;
    const int64_t at = (item - before) / parts, part = (item - before) % parts;
    const float* q = op.qkv + start * op.stride + at * size;
    if (at != laid) {
      head.wide = up16(head.length);
      head.keys = reinterpret_cast<float*>(work.scratch);
      head.values = head.keys + head.wide * size;
      head.scores = head.values + head.wide * up16(size);
      head.mixed = head.scores + kTallest * head.wide;
      head.bias = op.bias ? op.bias + (2 * at + 1) * op.reach - 1 : nullptr;
      const float* k = op.kv ? op.kv + keys[b] * op.kv_stride + at * size : q + width;
      lay_out(op, k, k + width, op.kv ? op.kv_stride : op.stride, head);
      laid = at;
    }
    const int64_t last = queries * (part + 1) / parts;
    for (int64_t row = queries * part / parts, tile; row < last; row += tile) {
      tile = tile_of(last - row);
      attend_tile(op, tile, row, q + row * op.stride, op.y + (start + row) * op.y_stride + at * size,
                  head);
    }
  }
}

}  // namespace hr::HR_NAME

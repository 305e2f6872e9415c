// Low-rank additions to a product (LoRA): y += B · (A · x), each token with the adapter of its slot.
//
// Two records, since all of A · x must be there before B: DOWN writes inner [N, parts · R], UP adds
// to y. Arithmetic, per token: 2 · r · (in + out) operations of fp32, and in a decoding step
// 4 · r · (in + out) bytes of A and B from memory for each adapter in it: with rank 16 on all
// products of the default model 35 MB against the 392 MB of the model. Tokens of one slot that
// stand side by side are done four at a time, so that a prompt reads A and B once per four tokens.
// Rows of A beyond the adapter's own rank are not read.
//
// A token's sums are in the same order whoever stands beside it: sixteen lanes along `in`, added
// by the tree of f_sum; along the rank one after the other.
#pragma once
#include "simd.h"
#include "rows.h"
#include "work.h"

namespace {

constexpr int kLoraTokens = 4, kLoraRows = 4, kLoraOut = 256;

// The slot of each row's token.
struct Slots {
  const int32_t* of_token;
  const int64_t* tokens;  // of the rows; null: row n is token n

  HR_ALWAYS int32_t operator[](int64_t n) const { return of_token[tokens ? tokens[n] : n]; }
};

HR_INLINE Slots slots_of(const HrLora& op, const HrStep& step) {
  return {step.adapters, op.rows == HR_ROWS_R ? step.sample_rows : nullptr};
}

// Tokens that stand side by side from n on and have its slot: at most kLoraTokens, or `last`.
HR_INLINE int lora_run(const Slots& slots, int64_t n, int64_t last) {
  int run = 1;
  while (run < kLoraTokens && n + run < last && slots[n + run] == slots[n]) ++run;
  return run;
}

template <int T>
HR_INLINE void lora_dot(const HrLora& op, int64_t n, const float* a, int64_t rows, float* inner) {
  F sum[T][kLoraRows];
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < kLoraRows; ++j) sum[t][j] = f_zero();
  const float* row[kLoraRows];  // a row that is not there is read twice and dropped
  for (int j = 0; j < kLoraRows; ++j) row[j] = a + (j < rows ? j : 0) * op.in;
  int64_t i = 0;
  for (; i + 16 <= op.in; i += 16) {
    F x[T];
    for (int t = 0; t < T; ++t) x[t] = f_load(op.x + (n + t) * op.x_stride + i);
    for (int j = 0; j < kLoraRows; ++j) {
      F w = f_load(row[j] + i);
      for (int t = 0; t < T; ++t) sum[t][j] = f_fma(w, x[t], sum[t][j]);
    }
  }
  if (i < op.in)
    for (int j = 0; j < kLoraRows; ++j) {
      F w = f_tail(row[j] + i, op.in - i);
      for (int t = 0; t < T; ++t)
        sum[t][j] = f_fma(w, f_tail(op.x + (n + t) * op.x_stride + i, op.in - i), sum[t][j]);
    }
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < kLoraRows && j < rows; ++j)
      inner[(n + t) * op.inner_stride + j] = f_sum(sum[t][j]);
}

// Items: blocks of tokens × blocks of rows of A, the rows of all parts one after the other.
void op_lora_down(const HrLora& op, const hr::Work& work) {
  if (!work.step->adapters) return;
  const Slots slots = slots_of(op, *work.step);
  const int64_t rows = work.rows(op.rows);
  const int64_t blocks = (op.room + kLoraRows - 1) / kLoraRows, columns = op.count * blocks;
  const int64_t total = (rows + kLoraTokens - 1) / kLoraTokens * columns;
  int64_t first, end;
  work.share(total, &first, &end);
  for (int64_t item = first; item < end; ++item) {
    const int64_t part = item % columns / blocks, row = item % blocks * kLoraRows;
    const int64_t begin = item / columns * kLoraTokens;
    const int64_t last = begin + kLoraTokens < rows ? begin + kLoraTokens : rows;
    for (int64_t n = begin; n < last;) {
      const int run = lora_run(slots, n, last);
      const int64_t rank = slots[n] < 0 ? 0 : op.ranks[slots[n]];
      if (row < rank) {
        const float* a = op.down + (slots[n] * op.count * op.room + part * op.room + row) * op.in;
        float* inner = op.inner + part * op.room + row;
        switch (run) {
          case 1: lora_dot<1>(op, n, a, rank - row, inner); break;
          case 2: lora_dot<2>(op, n, a, rank - row, inner); break;
          case 3: lora_dot<3>(op, n, a, rank - row, inner); break;
          default: lora_dot<4>(op, n, a, rank - row, inner);
        }
      }
      n += run;
    }
  }
}

template <int T>
HR_INLINE void lora_add(const HrLora& op, int64_t n, int64_t rank, const float* inner,
                        const float* up, int64_t out, int64_t first, int64_t from, int64_t to) {
  for (int64_t o = from; o < to; o += 16) {
    const int64_t left = to - o;
    F sum[T];
    for (int t = 0; t < T; ++t) sum[t] = f_zero();
    for (int64_t k = 0; k < rank; ++k) {
      F w = f_tail(up + k * out + o, left);
      for (int t = 0; t < T; ++t)
        sum[t] = f_fma(f_set(inner[(n + t) * op.inner_stride + k]), w, sum[t]);
    }
    for (int t = 0; t < T; ++t) {
      float* y = op.y + (n + t) * op.y_stride + first + o;
      f_store_tail(y, f_add(f_tail(y, left), sum[t]), left);
    }
  }
}

// Items: blocks of tokens × blocks of outputs, of one part after the other.
void op_lora_up(const HrLora& op, const hr::Work& work) {
  if (!work.step->adapters) return;
  const Slots slots = slots_of(op, *work.step);
  const int64_t rows = work.rows(op.rows);
  const int64_t tokens = (rows + kLoraTokens - 1) / kLoraTokens;
  for (int32_t p = 0; p < op.count; ++p) {
    const HrLoraPart& part = op.parts[p];
    const int64_t columns = (part.out + kLoraOut - 1) / kLoraOut;
    int64_t first, end;
    work.share(tokens * columns, &first, &end);
    for (int64_t item = first; item < end; ++item) {
      const int64_t from = item % columns * kLoraOut;
      const int64_t to = from + kLoraOut < part.out ? from + kLoraOut : part.out;
      const int64_t begin = item / columns * kLoraTokens;
      const int64_t last = begin + kLoraTokens < rows ? begin + kLoraTokens : rows;
      for (int64_t n = begin; n < last;) {
        const int run = lora_run(slots, n, last);
        const int64_t rank = slots[n] < 0 ? 0 : op.ranks[slots[n]];
        if (rank) {
          const float* inner = op.inner + p * op.room;
          const float* up = part.up + slots[n] * static_cast<int64_t>(op.room) * part.out;
          switch (run) {
            case 1: lora_add<1>(op, n, rank, inner, up, part.out, part.first, from, to); break;
            case 2: lora_add<2>(op, n, rank, inner, up, part.out, part.first, from, to); break;
            case 3: lora_add<3>(op, n, rank, inner, up, part.out, part.first, from, to); break;
            default: lora_add<4>(op, n, rank, inner, up, part.out, part.first, from, to);
          }
        }
        n += run;
      }
    }
  }
}

}  // namespace

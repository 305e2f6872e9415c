// Rope, QK norm and the KV write: one pass over q, k and v.
//
// Bound by memory and small: a token reads (H + 2G) · E floats, writes q back and K and V to their
// pages. K's page is transposed (pages.h), so a token's K is E / 2 stores (bf16) S pairs apart; the
// sixteen tokens of a block write the same lines one after the other.
#pragma once
#include "pages.h"

namespace {

// x [E] to `head`, scaled to a root mean square of one, and by weight + offset where there is one.
HR_INLINE void norm_head(float* head, const float* x, int64_t size, const float* weight, float eps,
                         float offset) {
  F square = f_zero();
  for (int64_t i = 0; i < size; i += 16) {
    F v = f_load(x + i);
    square = f_fma(v, v, square);
  }
  const float inverse =
      1.0f / __builtin_sqrtf(f_sum(square) / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; i += 16) {
    F v = f_mul(f_load(x + i), f_set(inverse));
    if (weight) v = f_mul(v, f_add(f_load(weight + i), f_set(offset)));
    f_store(head + i, v);
  }
}

HR_INLINE void rotate_head(float* head, int64_t half, const float* cos, const float* sin) {
  int64_t i = 0;
  for (; i + 16 <= half; i += 16) {
    F a = f_load(head + i), b = f_load(head + half + i);
    F c = f_load(cos + i), s = f_load(sin + i);
    f_store(head + i, f_fnma(b, s, f_mul(a, c)));
    f_store(head + half + i, f_fma(a, s, f_mul(b, c)));
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = __builtin_fmaf(-b, sin[i], a * cos[i]);
    head[half + i] = __builtin_fmaf(a, sin[i], b * cos[i]);
  }
}

// Pairs (2i, 2i + 1), as GPT-J and the original Llama have them.
HR_INLINE void rotate_pairs(float* head, int64_t half, const float* cos, const float* sin) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[2 * i], b = head[2 * i + 1];
    head[2 * i] = __builtin_fmaf(-b, sin[i], a * cos[i]);
    head[2 * i + 1] = __builtin_fmaf(a, sin[i], b * cos[i]);
  }
}

// By what queries grow: rounded once, from double.
HR_INLINE float growth_at(const HrRope& op, int64_t position) {
  const double steps = static_cast<double>((position + op.first) / op.every);
  return static_cast<float>(1.0 + op.growth * __builtin_log1p(steps));
}

// Cosines and sines of a token whose pairs turn by positions on axes of their own.
HR_INLINE void turn_by_axes(const HrRope& op, const HrStep& step, int64_t n, float* cos,
                            float* sin) {
  const int64_t half = op.rotated / 2;
  for (int64_t i = 0; i < half; ++i) {
    const int64_t at = step.turns[op.axes[i] * step.n + n] * half + i;
    cos[i] = op.cos[at];
    sin[i] = op.sin[at];
  }
}

void op_rope(const HrRope& op, const hr::Work& work) {
  const HrKv& kv = op.kv;
  const int64_t size = kv.head_dim, half = op.rotated / 2;
  const HrGroup& group = work.step->groups[kv.group];
  const bool by_axes = op.axes && work.step->turns;
  auto* turned = reinterpret_cast<float*>(work.scratch + 9 * size);
  int64_t first, last;
  work.share(work.step->n, &first, &last);
  const bool elsewhere = op.values == HR_VALUES_ELSEWHERE;
  const int kv_heads = elsewhere ? 0 : kv.kv_heads;
  auto* value = reinterpret_cast<float*>(work.scratch + 5 * size);
  for (int64_t n = first; n < last; ++n) {
    float* row = op.qkv + n * op.stride;
    const int64_t position = work.step->positions[n];
    const F grown = f_set(op.growth > 0 ? growth_at(op, position) : 1.0f);
    const float* cos = op.cos + position * half;
    const float* sin = op.sin + position * half;
    if (by_axes) {
      turn_by_axes(op, *work.step, n, turned, turned + half);
      cos = turned;
      sin = turned + half;
    }
    if (op.whole) {
      float* k = row + kv.heads * size;
      norm_head(row, row, kv.heads * size, op.q_norm, op.eps, op.offset);
      norm_head(k, k, kv.kv_heads * size, op.k_norm, op.eps, op.offset);
    }
    for (int h = 0; h < kv.heads + kv_heads; ++h) {
      float* head = row + h * size;
      const float* v = kv.v ? head + kv_heads * size : nullptr;
      if (h >= kv.heads && op.values != HR_VALUES_OWN) {
        norm_head(value, op.values == HR_VALUES_KEYS ? head : v, size, nullptr, op.eps, 0);
        v = value;
      }
      const float* weight = h < kv.heads ? op.q_norm : op.k_norm;
      if (kv.bias && h >= kv.heads) {  // then there are no norms
        const float* bias = kv.bias + (h - kv.heads) * size;
        for (int64_t i = 0; i < size; i += 16)
          f_store(head + i, f_sub(f_load(head + i), f_load(bias + i)));
      }
      if (weight && !op.whole) norm_head(head, head, size, weight, op.eps, op.offset);
      if (op.interleaved) rotate_pairs(head, half, cos, sin);
      else rotate_head(head, half, cos, sin);
      if (op.behind) norm_head(head, head, size, nullptr, op.eps, 0);
      if (op.growth > 0 && h < kv.heads)
        for (int64_t i = 0; i < size; i += 16) f_store(head + i, f_mul(f_load(head + i), grown));
      if (h >= kv.heads && kv.k) write_kv(kv, group.slots[n], h - kv.heads, head, v, work.scratch);
    }
  }
}

}  // namespace

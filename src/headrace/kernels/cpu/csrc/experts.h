// A mixture of experts: which of them a row goes to, and what they make of it.
//
// Four records. ROUTE chooses by a router's logits. PLACE lays the rows of each expert one behind
// the other, as codes or floats, whichever its products read: the first of them in a first lane of
// six, so that an expert's rows are a matrix of their own. UP leaves act(x · gateᵀ) · (x · upᵀ) of
// every place, DOWN adds up each row's experts by its shares.
//
// A step reads the weights of each expert that some row goes to once, whatever the number of rows:
// memory is the limit, and its bytes are the active experts'. What is copied is small beside them:
// 4 KB for a row and an expert of 2,048 inputs, whose weights take 2.7 MB in four bits. UP's items
// are 32 outputs of gate and up of one expert, as of a dense feed-forward (gate_up.h). DOWN's are
// some outputs of all experts: one thread adds them up, and in ascending order of the experts, so
// that neither threads nor other rows are in any bit of a sum. Where whole experts are dealt out to
// ranks, UP and DOWN are of a rank's own, DOWN leaves what they give as it is, and SUM adds it up
// behind an exchange, in the same order.
#pragma once
#include "records.h"
#include "products.h"
#include "rows.h"

namespace {

constexpr int64_t kExpertRows = 96;   // rows whose sums are kept at once: a multiple of six
constexpr int64_t kExpertPanels = 8;  // panels of an item of DOWN, at most

// act(gate) · up. Clamped (gpt-oss): gate · sigmoid(1.702 gate) · (up + 1), of a gate of at most
// seven and an up between −7 and 7.
HR_INLINE F gate_of(int32_t activation, F gate, F up) {
  if (activation != HR_CLAMPED) return f_mul(activate(activation, gate), up);
  const F most = f_set(7.0f), one = f_set(1.0f);
  gate = f_min(most, gate);
  up = f_max(f_set(-7.0f), f_min(most, up));
  const F inverse = f_exp(f_min(f_set(80.0f), f_mul(gate, f_set(-1.702f))));
  return f_mul(f_div(gate, f_add(one, inverse)), f_add(up, one));
}

// The first of the highest that are open; never −1 while one is, whatever the numbers are.
HR_INLINE int64_t highest_open(const float* wish, const uint8_t* open, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (open[i] && (best < 0 || wish[i] > wish[best])) best = i;
  return best;
}

// Leave open the groups whose two highest sum up to the most (DeepSeek-V3, section 2.1.2).
HR_INLINE void open_groups(const HrRoute& op, const float* wish, uint8_t* open) {
  const int64_t size = op.experts / op.groups;
  float sums[HR_MAX_EXPERT_GROUPS];
  uint8_t left[HR_MAX_EXPERT_GROUPS];
  for (int64_t g = 0; g < op.groups; ++g) {
    uint8_t* own = open + g * size;
    const int64_t first = highest_open(wish + g * size, own, size);
    own[first] = 0;
    const int64_t second = highest_open(wish + g * size, own, size);
    sums[g] = wish[g * size + first] + (second < 0 || op.best < 2 ? 0.0f : wish[g * size + second]);
    left[g] = 1;
  }
  memset(open, 0, static_cast<size_t>(op.experts));
  for (int32_t i = 0; i < op.active_groups; ++i) {
    const int64_t g = highest_open(sums, left, op.groups);
    left[g] = 0;
    memset(open + g * size, 1, static_cast<size_t>(size));
  }
}

// Scores of a row: a softmax over all, or of each its sigmoid or √ log(1 + eˣ) (DeepSeek-V4).
HR_INLINE void score_row(const HrRoute& op, const float* logits, float* scores) {
  float highest = logits[0], total = 0;
  for (int64_t e = 1; e < op.experts; ++e) highest = logits[e] > highest ? logits[e] : highest;
  for (int64_t e = 0; e < op.experts; e += 16) {
    const int64_t left = op.experts - e;
    const F x = f_tail(logits + e, left);
    F y;
    if (op.scores == HR_EACH_SQRT_SOFTPLUS) {
      y = f_softplus(x);
    } else if (op.scores == HR_EACH_SIGMOID) {
      const F inverse = f_exp(f_min(f_set(80.0f), f_sub(f_zero(), x)));
      y = f_div(f_set(1.0f), f_add(f_set(1.0f), inverse));
    } else {
      y = f_exp(f_max(f_set(-80.0f), f_sub(x, f_set(highest))));
    }
    f_store_tail(scores + e, y, left);
  }
  if (op.scores == HR_EACH_SQRT_SOFTPLUS)
    for (int64_t e = 0; e < op.experts; ++e) scores[e] = __builtin_sqrtf(scores[e]);
  if (op.scores != HR_OVER_ALL) return;
  for (int64_t e = 0; e < op.experts; ++e) total += scores[e];
  for (int64_t e = 0; e < op.experts; ++e) scores[e] /= total;
}

int64_t route_scratch(const HrRoute& op) { return 9 * static_cast<int64_t>(op.experts); }

void op_route(const HrRoute& op, const hr::Work& work) {
  auto* scores = reinterpret_cast<float*>(work.scratch);
  float* biased = scores + op.experts;
  auto* open = reinterpret_cast<uint8_t*>(biased + op.experts);
  int64_t first, last;
  work.share(work.rows(op.rows), &first, &last);
  for (int64_t row = first; row < last; ++row) {
    const float* logits = op.logits + row * op.logits_stride;
    int32_t* chosen = op.chosen + row * op.chosen_stride;
    float* shares = op.shares + row * op.shares_stride;
    score_row(op, logits, scores);
    const float* wish = op.scores == HR_OVER_ALL ? logits : scores;  // a softmax keeps the order
    if (op.bias) {
      for (int64_t e = 0; e < op.experts; ++e) biased[e] = scores[e] + op.bias[e];
      wish = biased;
    }
    memset(open, 1, static_cast<size_t>(op.experts));
    if (op.groups > 1) open_groups(op, wish, open);
    float total = 1e-20f;
    for (int32_t k = 0; k < op.active; ++k) {
      const int64_t e = highest_open(wish, open, op.experts);
      open[e] = 0;
      chosen[k] = static_cast<int32_t>(e);
      shares[k] = scores[e];
      total += scores[e];
    }
    for (int32_t k = 0; k < op.active; ++k)
      shares[k] = (op.normalise ? shares[k] / total : shares[k]) *
                  (op.gains ? op.gains[chosen[k]] * op.scale : op.scale);
  }
}

// Where each row of each expert goes. Every thread counts, and copies its own share of the rows.
void op_place(const HrExperts& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.rows), units = op.in / HR_UNIT_K;
  auto* next = reinterpret_cast<int32_t*>(work.scratch);
  memset(next, 0, 4 * static_cast<size_t>(op.experts));
  for (int64_t n = 0; n < rows; ++n)
    for (int32_t k = 0; k < op.active; ++k) ++next[op.chosen[n * op.chosen_stride + k]];
  int32_t at = 0, spans = 0, own = 0;
  for (int32_t e = 0; e < op.experts; ++e) {
    const int32_t count = next[e];
    next[e] = at;
    if (count == 0) continue;
    const HrSpan span = {e, at, count};
    if (work.thread == 0) op.spans[spans] = span;
    ++spans;
    at += (count + HR_SIX - 1) / HR_SIX * HR_SIX;
    if (!op.deal || work.thread) continue;
    op.deal->went[e] += 8 + count;
    if (op.deal->owners[e] == op.deal->rank) op.deal->own[own++] = span;
  }
  if (work.thread == 0) op.spans[spans] = {-1, at, 0};
  if (op.deal && work.thread == 0) op.deal->own[own] = {-1, at, 0};
  int64_t first, last;
  work.share(rows, &first, &last);
  for (int64_t n = 0; n < last; ++n)
    for (int32_t k = 0; k < op.active; ++k) {
      const int64_t place = next[op.chosen[n * op.chosen_stride + k]]++;
      if (n < first) continue;
      op.row_of[place] = static_cast<int32_t>(n);
      const float share = op.shares[n * op.shares_stride + k];
      op.share_of[place] = op.inside ? 1.0f : share;
      if (op.deal && op.deal->owners[op.chosen[n * op.chosen_stride + k]] != op.deal->rank) continue;
      if (op.placed.six)
        for (int64_t u = 0; u < units; ++u) {
          HrLane* lane = lane_of(op.placed, place, u);
          *lane = *lane_of(op.x, n, u);
          if (!op.inside) continue;
          lane->unit.scale *= share;
          lane->unit.sum *= share;
        }
      if (op.placed_dense)
        memcpy(op.placed_dense + place * op.placed_stride, op.dense + n * op.dense_stride,
               4 * static_cast<size_t>(op.in));
      if (op.placed_dense && op.inside)
        for (int64_t i = 0; i < op.in; ++i) op.placed_dense[place * op.placed_stride + i] *= share;
    }
}

// y[i][j]: output `from` + j of a matrix for the row at `place` + i, which is a first lane.
HR_INLINE void expert_sums(const HrQuantised& x, const float* dense, int64_t stride, HrPart part,
                           int64_t place, int64_t rows, int64_t from, int64_t outputs, float* y,
                           int64_t y_stride) {
  HrLinear op{};
  op.x = {x.six ? x.six + place / HR_SIX * x.stride : nullptr, x.stride};
  op.dense = dense ? dense + place * stride : nullptr;
  op.dense_stride = stride;
  part.data += from / HR_PANEL * hr::panel_bytes(part.kind, part.in);
  part.out = static_cast<int32_t>(outputs);
  part.y = y;
  part.y_stride = y_stride;
  part_panels(op, part, rows, 0, hr::panel_count(outputs));
}

int64_t experts_scratch(const HrExperts& op) {
  const int64_t sums = kExpertRows * kExpertPanels * HR_PANEL * 4, counts = 4 * op.experts;
  return sums > counts ? sums : counts;
}

const HrSpan* own_of(const HrExperts& op) { return op.deal ? op.deal->own : op.spans; }

// Adds to y, by their shares, what `expert` gives of the rows at `place` …: outputs `from` ….
HR_INLINE void add_shares(const HrExperts& op, int64_t expert, int64_t place, int64_t rows,
                          int64_t from, int64_t outputs, const float* sums, int64_t stride) {
  const float* bias = op.down_bias ? op.down_bias + expert * op.out + from : nullptr;
  for (int64_t i = 0; i < rows; ++i) {
    float* y = op.y + op.row_of[place + i] * op.y_stride + from;
    const F share = f_set(op.share_of[place + i]);
    for (int64_t j = 0; j < outputs; j += 16) {
      F v = f_load(sums + i * stride + j);
      if (bias) v = f_add(v, f_tail(bias + j, outputs - j));
      f_store_tail(y + j, f_fma(share, v, f_tail(y + j, outputs - j)), outputs - j);
    }
  }
}

HR_INLINE void clear_outputs(const HrExperts& op, int64_t rows, int64_t from, int64_t outputs) {
  for (int64_t n = 0; n < rows; ++n)
    memset(op.y + n * op.y_stride + from, 0, 4 * static_cast<size_t>(outputs));
}

void op_experts_up(const HrExperts& op, const hr::Work& work) {
  const int64_t units = (op.inner_size + HR_UNIT_K - 1) / HR_UNIT_K;
  if (work.rows(op.rows) == 0) return;
  auto* gate = reinterpret_cast<float*>(work.scratch);
  float* up = gate + kExpertRows * HR_UNIT_K;
  const HrSpan* own = own_of(op);
  int64_t spans = 0;
  while (own[spans].expert >= 0) ++spans;
  int victim = 0;
  int64_t item;
  while (work.next_in_line(spans * units, &victim, &item)) {
    const HrSpan span = own[item / units];
    const HrPart* matrices = op.matrices + 3 * span.expert;
    const int64_t unit = item % units, from = unit * HR_UNIT_K;
    const int64_t left = op.inner_size - from, outputs = left < HR_UNIT_K ? left : HR_UNIT_K;
    F bias[4] = {f_zero(), f_zero(), f_zero(), f_zero()};
    for (int64_t h = 0; op.up_bias && h < 4; ++h) {
      const int64_t own = 2 * span.expert + h / 2, within = 16 * (h % 2);
      if (within < outputs)
        bias[h] = f_tail(op.up_bias + own * op.inner_size + from + within, outputs - within);
    }
    for (int64_t row = 0; row < span.count; row += kExpertRows) {
      const int64_t m = span.count - row < kExpertRows ? span.count - row : kExpertRows;
      const int64_t place = span.first + row;
      for (int both = 0; both < 2; ++both)
        expert_sums(op.placed, op.placed_dense, op.placed_stride, matrices[both], place, m, from,
                    outputs, both ? up : gate, HR_UNIT_K);
      for (int64_t i = 0; i < m; ++i) {
        F v[2] = {f_zero(), f_zero()};
        for (int64_t h = 0; h < 2 && 16 * h < outputs; ++h) {
          const int64_t at = i * HR_UNIT_K + 16 * h;
          v[h] = gate_of(op.activation, f_add(f_load(gate + at), bias[h]),
                         f_add(f_load(up + at), bias[2 + h]));
          if (op.inner_dense)
            f_store_tail(op.inner_dense + (place + i) * op.inner_stride + from + 16 * h, v[h],
                         outputs - 16 * h);
        }
        if (op.inner.six) quantise_at(op.inner, place + i, unit, v[0], v[1]);
      }
    }
  }
}

void op_experts_down(const HrExperts& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.rows), panels = hr::panel_count(op.out);
  const HrSpan* own = own_of(op);
  if (rows == 0 || own->expert < 0) return;
  const int64_t stride = op.deal ? op.deal->stride : kExpertPanels * HR_PANEL;
  const HrPart& any = op.matrices[3 * own->expert + 2];
  int64_t run = kRun / hr::panel_bytes(any.kind, any.in), fair = panels / (4 * work.threads);
  run = run < fair ? run : fair;
  run = run < 1 ? 1 : run > kExpertPanels ? kExpertPanels : run;
  int victim = 0;
  int64_t item;
  while (work.next_in_line((panels + run - 1) / run, &victim, &item)) {
    const int64_t from = item * run * HR_PANEL, left = op.out - from;
    const int64_t outputs = left < run * HR_PANEL ? left : run * HR_PANEL;
    if (!op.deal) clear_outputs(op, rows, from, outputs);
    for (const HrSpan* span = own; span->expert >= 0; ++span)
      for (int64_t row = 0; row < span->count; row += kExpertRows) {
        const int64_t m = span->count - row < kExpertRows ? span->count - row : kExpertRows;
        const int64_t place = span->first + row;
        float* sums = op.deal ? op.deal->values + place * stride + from
                              : reinterpret_cast<float*>(work.scratch);
        expert_sums(op.inner, op.inner_dense, op.inner_stride, op.matrices[3 * span->expert + 2],
                    place, m, from, outputs, sums, stride);
        if (!op.deal) add_shares(op, span->expert, place, m, from, outputs, sums, stride);
      }
  }
}

// What all ranks' experts gave.
void op_experts_sum(const HrExperts& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.rows), width = kExpertPanels * HR_PANEL;
  int victim = 0;
  int64_t item;
  while (rows && work.next_in_line((op.out + width - 1) / width, &victim, &item)) {
    const int64_t from = item * width, outputs = op.out - from < width ? op.out - from : width;
    clear_outputs(op, rows, from, outputs);
    for (const HrSpan* span = op.spans; span->expert >= 0; ++span)
      add_shares(op, span->expert, span->first, span->count, from, outputs,
                 op.deal->values + span->first * op.deal->stride + from, op.deal->stride);
  }
}

}  // namespace

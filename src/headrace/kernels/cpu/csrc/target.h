// The end of a product: bias, sum with what is there, the last panel's missing outputs; or no
// matrix at all, where only the highest output of each row is wanted (head.h).
#pragma once
#include "activations.h"
#include "tails.h"
#include "work.h"

namespace {

struct Target {
  float* y;
  const float* bias;
  int left;  // outputs of this panel that exist, 1 … 16
  HrInto into;
  int32_t first;  // the panel's first output
};

// Of equal values the lowest output wins, in whatever order panels come: a thread goes through its
// share front to back and may then help with one that lies before it. A NaN is never kept. After
// the first panels hardly any output passes the comparison.
HR_INLINE void keep_best(const Target& t, F acc) {
  auto* best = reinterpret_cast<HrBest*>(t.y);
  uint32_t bits = f_not_below(acc, f_set(best->value));
  if (t.left < HR_PANEL) bits &= (1u << t.left) - 1;
  if (__builtin_expect(bits == 0, 1)) return;
  float values[HR_PANEL];
  f_store(values, acc);
  for (; bits; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    if (values[lane] > best->value ||
        (values[lane] == best->value && t.first + lane < best->token))
      *best = {values[lane], t.first + lane};
  }
}

// Not inlined: the paths that only store or add stay as short as they were.
__attribute__((noinline)) void finish_activated(const Target& t, F acc) {
  if (t.bias) acc = f_add(acc, f_tail(t.bias, t.left));
  f_store_tail(t.y, activate(t.into - HR_ACTIVATED, acc), t.left);
}

HR_INLINE void finish(const Target& t, F acc) {
  if (t.into >= HR_KEEP)
    return t.into == HR_KEEP ? keep_best(t, acc) : finish_activated(t, acc);
  if (t.left >= HR_PANEL) {
    if (t.bias) acc = f_add(acc, f_load(t.bias));
    if (t.into == HR_ADD) acc = f_add(f_load(t.y), acc);
    f_store(t.y, acc);
    return;
  }
  float values[HR_PANEL];
  f_store(values, acc);
  for (int o = 0; o < t.left; ++o) {
    float value = values[o];
    if (t.bias) value += t.bias[o];
    if (t.into == HR_ADD) value = t.y[o] + value;
    t.y[o] = value;
  }
}

HR_INLINE Target target_of(const HrPart& part, int64_t row, int64_t panel) {
  const int64_t first = panel * HR_PANEL;
  const int64_t left = part.out - first;
  const auto into = static_cast<HrInto>(part.accumulate);
  return {part.y + row * part.y_stride + (into == HR_KEEP ? 0 : first),
          part.bias ? part.bias + first : nullptr,
          static_cast<int>(left < HR_PANEL ? left : HR_PANEL), into, static_cast<int32_t>(first)};
}

}  // namespace

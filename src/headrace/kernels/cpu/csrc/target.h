// The end of a product: bias, sum with what is there, the last panel's missing outputs.
#pragma once
#include "simd.h"
#include "work.h"

namespace {

struct Target {
  float* y;
  const float* bias;
  int left;  // outputs of this panel that exist, 1 … 16
  bool accumulate;
};

HR_INLINE void finish(const Target& t, F acc) {
  if (t.left >= HR_PANEL) {
    if (t.bias) acc = f_add(acc, f_load(t.bias));
    if (t.accumulate) acc = f_add(f_load(t.y), acc);
    f_store(t.y, acc);
    return;
  }
  float values[HR_PANEL];
  f_store(values, acc);
  for (int o = 0; o < t.left; ++o) {
    float value = values[o];
    if (t.bias) value += t.bias[o];
    if (t.accumulate) value = t.y[o] + value;
    t.y[o] = value;
  }
}

HR_INLINE Target target_of(const HrPart& part, int64_t row, int64_t panel) {
  const int64_t first = panel * HR_PANEL;
  const int64_t left = part.out - first;
  return {part.y + row * part.y_stride + first, part.bias ? part.bias + first : nullptr,
          static_cast<int>(left < HR_PANEL ? left : HR_PANEL), part.accumulate != 0};
}

}  // namespace

// Rows whose width is no multiple of sixteen: their last lanes.
#pragma once
#include "simd.h"

namespace {

HR_INLINE F f_tail(const float* p, int64_t left) {  // lanes beyond `left` are zero
  if (left >= 16) return f_load(p);
  float t[16] = {0};
  memcpy(t, p, static_cast<size_t>(left) * 4);
  return f_load(t);
}

HR_INLINE void f_store_tail(float* p, F x, int64_t left) {
  if (left >= 16) return f_store(p, x);
  float t[16];
  f_store(t, x);
  memcpy(p, t, static_cast<size_t>(left) * 4);
}

HR_INLINE F f_first(F x, int64_t count) {  // the lanes beyond `count` become zero
  float t[16];
  f_store(t, x);
  for (int64_t i = count; i < 16; ++i) t[i] = 0;
  return f_load(t);
}

}  // namespace

// Dense panels [k][16] in fp32, fp16 or bf16, activations in fp32: a plain fma chain over K.
//
// 16 outputs × one of K cost one load and, per row, one fma with a broadcast. One row reads 32 or
// 64 bytes a cycle: memory is the limit. Eight rows hold eight chains, which hides the latency of
// the fma (four cycles, two ports); the limit is then 32 fp32 operations a cycle and core.
#pragma once
#include "target.h"

namespace {

template <int K>
HR_INLINE F dense_load(const uint8_t* p, int64_t k) {
  if constexpr (K == HR_F32) return f_load(reinterpret_cast<const float*>(p) + 16 * k);
  const auto* q = reinterpret_cast<const uint16_t*>(p) + 16 * k;
  if constexpr (K == HR_F16) return f_half(q);
  return f_bf16(q);
}

template <int K, int M>
void dense_rows(const HrLinear& op, const HrPart& part, int64_t row, int64_t panel) {
  const uint8_t* w = part.data + panel * hr::panel_bytes(K, part.in);
  const float* x = op.dense + row * op.dense_stride;
  F acc[M];
  for (int m = 0; m < M; ++m) acc[m] = f_zero();
  for (int64_t k = 0; k < part.in; ++k) {
    F v = dense_load<K>(w, k);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[m] = f_fma(f_set(x[m * op.dense_stride + k]), v, acc[m]);
  }
  for (int m = 0; m < M; ++m) finish(target_of(part, row + m, panel), acc[m]);
}

template <int K>
void dense_panels(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                  int64_t last) {
  for (int64_t panel = first; panel < last; ++panel) {
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) dense_rows<K, 8>(op, part, row, panel);
    for (; row + 4 <= rows; row += 4) dense_rows<K, 4>(op, part, row, panel);
    for (; row < rows; ++row) dense_rows<K, 1>(op, part, row, panel);
  }
}

}  // namespace

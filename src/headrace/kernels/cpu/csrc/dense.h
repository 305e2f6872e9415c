// Dense panels [k][16] in fp32, fp16 or bf16, activations in fp32: tiles of chains over K (chain.h).
//
// One row reads 32 or 64 bytes a cycle: memory is the limit. Many rows pass over two panels while
// those lie in L1 or L2; the limit is then 32 fp32 operations a cycle and core on Zen 4 (one fma of
// 512 bits), twice that where there are two.
#pragma once
#include "chain.h"
#include "target.h"

namespace {

template <int K, int P>
void dense_tiles(const HrLinear& op, const HrPart& part, int64_t rows, int64_t panel) {
  alignas(64) float sums[kTallest * HR_PANEL * P];
  const int64_t bytes = hr::panel_bytes(K, part.in);
  for (int64_t row = 0, tile; row < rows; row += tile) {
    tile = tile_of(rows - row);
    const ChainTile of{op.dense + row * op.dense_stride, op.dense_stride,
                       part.data + panel * bytes, bytes, part.in, sums, HR_PANEL * P};
    chains<K, P>(tile, of);
    for (int64_t m = 0; m < tile; ++m)
      for (int p = 0; p < P; ++p)
        finish(target_of(part, row + m, panel + p), f_load(sums + (m * P + p) * HR_PANEL));
  }
}

template <int K>
void dense_panels(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                  int64_t last) {
  // One or two rows: memory is the limit, and one stream is read faster than two.
  const bool pairs = kPair == 2 && rows > 2;
  for (; pairs && first + 2 <= last; first += 2) dense_tiles<K, kPair>(op, part, rows, first);
  for (; first < last; ++first) dense_tiles<K, 1>(op, part, rows, first);
}

}  // namespace

// Dense panels [k][16] in fp32, fp16, bf16 or fp8, activations in fp32: tiles of chains over K
// (chain.h).
//
// One row of bf16 by one panel is 32 bytes for every four cycles that its chain waits for an fma: 8
// bytes a cycle, no more than a core reads from memory, so that nothing hides a wait. One or two
// rows go over four panels at once, four streams that the hardware's prefetcher follows; asking
// for their lines was slower on Zen 4 (levels.h has the others), and so were two panels or eight. A
// stream of fp8 is half as fast, and is asked for everywhere.
// With more rows there is too much arithmetic between the loads for it: their first tile asks for
// every line of its two panels 8 KiB before (two was too late). Tiles behind it find them in L1 or L2, where the limit is 32
// fp32 operations a cycle and core on Zen 4 (one fma of 512 bits), twice that where there are two.
#pragma once
#include "chain.h"
#include "entries.h"
#include "levels.h"
#include "target.h"

namespace {

constexpr int64_t kStreamed = 2;  // rows up to which memory is the limit
constexpr int kStreams = 4;       // panels that these read side by side

template <int P>
HR_INLINE void finish_tile(const HrPart& part, const float* sums, int64_t row, int64_t rows,
                           int64_t panel) {
  for (int64_t m = 0; m < rows; ++m)
    for (int p = 0; p < P; ++p)
      finish(target_of(part, row + m, panel + p), f_load(sums + (m * P + p) * HR_PANEL));
}

// M rows, which are all, by P panels.
template <int K, int M, int P>
void dense_streams(const HrLinear& op, const HrPart& part, int64_t panel) {
  alignas(64) float sums[M * HR_PANEL * P];
  const int64_t bytes = hr::panel_bytes(K, part.in);
  const ChainTile of{op.dense, op.dense_stride, part.data + panel * bytes, bytes, part.in, sums,
                     HR_PANEL * P};
  if (K != HR_E4M3 && !hr::fetching.few) chain<K, M, P>(of);
  else if (hr::fetching.near) chain<K, M, P, kToL1>(of);
  else chain<K, M, P, kToL2>(of);
  finish_tile<P>(part, sums, 0, M, panel);
}

template <int K, int M>
void dense_few(const HrLinear& op, const HrPart& part, int64_t first, int64_t last) {
  constexpr int wide = M == 1 || kPair == 2 ? kStreams : 2;  // as many sums as there are registers
  for (; first + wide <= last; first += wide) dense_streams<K, M, wide>(op, part, first);
  for (; first + 2 <= last; first += 2) dense_streams<K, M, 2>(op, part, first);
  for (; first < last; ++first) dense_streams<K, M, 1>(op, part, first);
}

template <int K, int P>
void dense_tiles(const HrLinear& op, const HrPart& part, int64_t rows, int64_t panel) {
  alignas(64) float sums[kTallest * HR_PANEL * P];
  const int64_t bytes = hr::panel_bytes(K, part.in);
  for (int64_t row = 0, tile; row < rows; row += tile) {
    tile = tile_of(rows - row);
    const ChainTile of{op.dense + row * op.dense_stride, op.dense_stride,
                       part.data + panel * bytes, bytes, part.in, sums, HR_PANEL * P};
    if (row == 0) chains<K, P, kToL2>(tile, of);
    else chains<K, P>(tile, of);
    finish_tile<P>(part, sums, row, tile, panel);
  }
}

template <int K>
void dense_panels(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                  int64_t last) {
  if (rows == 1) return dense_few<K, 1>(op, part, first, last);
  if (rows == kStreamed) return dense_few<K, 2>(op, part, first, last);
  for (; kPair == 2 && first + 2 <= last; first += 2) dense_tiles<K, kPair>(op, part, rows, first);
  for (; first < last; ++first) dense_tiles<K, 1>(op, part, rows, first);
}

}  // namespace

// Into a translation unit: products of one kind.
#define HR_DENSE(K)                                                                        \
  namespace hr::HR_NAME {                                                                  \
  void panels_##K(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,     \
                  int64_t last) {                                                          \
    dense_panels<HR_##K>(op, part, rows, first, last);                                     \
  }                                                                                        \
  }

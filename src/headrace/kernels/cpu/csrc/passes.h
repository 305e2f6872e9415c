// Passes of up to kWide rows over a group of panels.
#pragma once
#include "panel.h"
#include "panel_twins.h"

namespace {

// M rows by `panels` panels, kGroup at most; sums[m][kGroup][16].
template <class Q, int M, Fetch kFetch>
__attribute__((noinline)) void group_rows(Panel panel, int panels, int blocks, Rows x, Ahead ahead,
                                          float* sums) {
  int p = 0;
#if HR_LEVEL >= 4
  if constexpr (kByTwo<Q, M>)
    for (; p + 1 < panels; p += 2, sums += 2 * HR_PANEL) {
      twin_rows<Q, M>(panel, blocks, x, sums);
      panel.data += static_cast<int64_t>(2 * blocks) * Q::format.block_bytes();
      panel.low += static_cast<int64_t>(2 * blocks) * Q::format.units() * Q::format.low_bytes;
    }
#endif
  for (; p < panels; ++p, sums += HR_PANEL) {
    F acc[M];
    panel_rows<Q, M, kFetch>(panel, blocks, x, ahead, acc);
    for (int m = 0; m < M; ++m) f_store(sums + m * kSums, acc[m]);
    panel.data += static_cast<int64_t>(blocks) * Q::format.block_bytes();
    panel.low += static_cast<int64_t>(blocks) * Q::format.units() * Q::format.low_bytes;
  }
}

// One pass: rows [row, row + m) by `panels` panels of `part` from `panel` on. `pass` counts from
// zero: later ones find the panels in L2 and fetch as many of the next.
template <class Q>
HR_INLINE void pass_rows(const HrQuantised& activations, const HrPart& part, int64_t panel,
                         int panels, int64_t row, int m, int pass, int passes, float* sums) {
  constexpr hr::Format f = Q::format;
  const int blocks = part.in / f.span;
  const int64_t all = static_cast<int64_t>(panels) * blocks;
  const Panel data = panel_of<Q>(part, panel);
  const Rows x = rows_from(activations, row);
  const Ahead ahead{all * f.block_bytes(), all * f.units() * f.low_bytes, pass - 1, passes - 1};
#define HR_CASE(M)                                                                      \
  case M:                                                                               \
    if (M < kFew && !hr::fetching.few)                                           \
      return group_rows<Q, M < kFew ? M : 1, kHardware>(data, panels, blocks, x, ahead, \
                                                        sums);                          \
    if (pass == 0 || M < 6)                                                             \
      return group_rows<Q, M, kOwn>(data, panels, blocks, x, ahead, sums);              \
    return group_rows<Q, M < 6 ? 6 : M, kNext>(data, panels, blocks, x, ahead, sums);
  switch (m) {
    HR_CASE(1) HR_CASE(2) HR_CASE(3) HR_CASE(4) HR_CASE(5) HR_CASE(6)
#if HR_LEVEL >= 3
    HR_CASE(7) HR_CASE(8) HR_CASE(9) HR_CASE(10) HR_CASE(11) HR_CASE(12)
#endif
  }
#undef HR_CASE
}

}  // namespace

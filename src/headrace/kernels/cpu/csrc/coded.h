// Products of one kind of codes: what HR_CODED(kind) puts into a translation unit (entries.h).
#pragma once
#include "entries.h"
#include "panel_pairs.h"
#include "passes.h"
#include "target.h"

namespace {

#if HR_LEVEL >= 4
// Many rows: kManyRows at a time, whose sums are kept while K goes by.
template <class Q>
void many_rows(const HrLinear& op, const HrPart& part, int64_t rows, int64_t panel, int count) {
  alignas(64) float sums[kManyRows * kSums];
  for (int64_t row = 0; row < rows; row += kManyRows) {
    const int m = static_cast<int>(rows - row < kManyRows ? rows - row : kManyRows);
    paired_sums<Q>(op.x, part, panel, count, row, m, sums, kSums);
    for (int i = 0; i < m; ++i)
      for (int p = 0; p < count; ++p)
        finish(target_of(part, row + i, panel + p), f_load(sums + i * kSums + p * HR_PANEL));
  }
}
#endif

template <class Q>
void quantised_panels(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                      int64_t last) {
  alignas(64) float sums[kWide * kSums];
  const int passes = passes_of(rows);
  for (int64_t panel = first; panel < last; panel += kGroup) {
    const int count = static_cast<int>(last - panel < kGroup ? last - panel : kGroup);
#if HR_LEVEL >= 4
    if (rows > hr::fetching.coded) {
      many_rows<Q>(op, part, rows, panel, count);
      continue;
    }
#endif
    int64_t row = 0;
    for (int pass = 0; pass < passes; ++pass) {
      const int m = rows_of_pass(rows - row);
      pass_rows<Q>(op.x, part, panel, count, row, m, pass, passes, sums);
      for (int i = 0; i < m; ++i, ++row)
        for (int p = 0; p < count; ++p)
          finish(target_of(part, row, panel + p), f_load(sums + i * kSums + p * HR_PANEL));
    }
  }
}

}  // namespace

#define HR_PANELS(Q)                                                                           \
  namespace hr::HR_NAME {                                                                      \
  void panels_##Q(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,         \
                  int64_t last) {                                                              \
    quantised_panels<Q>(op, part, rows, first, last);                                          \
  }                                                                                            \
  }
#if HR_LEVEL >= 4
#define HR_UNITS(Q)                                                                            \
  void units_##Q(const HrQuantised& x, const HrPart& part, int64_t unit, int64_t row, int m,   \
                 float* sums) {                                                                \
    paired_sums<Q>(x, part, 2 * unit, 2, row, m, sums, HR_UNIT_K);                             \
  }
#else
#define HR_UNITS(Q)
#endif
#define HR_CODED(Q)                                                                            \
  HR_PANELS(Q)                                                                                 \
  namespace hr::HR_NAME {                                                                      \
  void unit_##Q(const HrQuantised& x, const HrPart& part, int64_t unit, int64_t row, int m,    \
                int pass, int passes, float* sums) {                                           \
    pass_rows<Q>(x, part, 2 * unit, 2, row, m, pass, passes, sums);                            \
  }                                                                                            \
  HR_UNITS(Q)                                                                                  \
  }

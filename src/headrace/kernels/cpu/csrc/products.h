// y = x · wᵀ: a product's panels shared among the threads.
//
// Weights are read once, front to back, each thread's in one stream; panel.h has the arithmetic.
// Items are runs of panels. With few rows a run is about kRun bytes, so that the streams stay
// long; with many it is a group that stays in L2 while the rows pass over it, together with the
// rows' own codes of that pass.
#pragma once
#include "dense.h"
#include "entries.h"
#include "panel.h"

namespace {

constexpr int64_t kRun = 48 * 1024;     // bytes of weights handed out at a time
constexpr int64_t kInL2 = 160 * 1024;   // bytes of a group that many rows pass over

HR_INLINE int64_t run_of(const HrPart& part, int64_t rows, int threads) {
  const int64_t fair = hr::panel_count(part.out) / (4 * threads);
  int64_t run = (rows > kWide ? kInL2 : kRun) / hr::panel_bytes(part.kind, part.in);
  if (run > fair) run = fair;
  if (rows > kWide && run > kGroup) run = kGroup;
  if (rows > kFew && part.kind < HR_F32 && fair > 1) run = run < 2 ? 2 : run - run % 2;  // panel_twins.h
  if (rows <= kStreamed && part.kind >= HR_F32) {
    // Whole tiles, and as few as one for each thread.
    if (run < kStreams && hr::panel_count(part.out) >= kStreams * threads) run = kStreams;
    if (run > kStreams) run -= run % kStreams;
  }
  return run < 1 ? 1 : run;
}

void part_panels(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                 int64_t last) {
#define HR_EACH(K) \
  case HR_##K: return hr::HR_NAME::panels_##K(op, part, rows, first, last);
  switch (part.kind) {
    HR_CODED_KINDS(HR_EACH)
    HR_EACH(Q8_0_PLANES)
    HR_DENSE_KINDS(HR_EACH)
  }
#undef HR_EACH
}

// body(part, first, last) for the runs of panels [first, last) that fall to this thread.
template <class Body>
HR_INLINE void each_run(const HrLinear& op, int64_t rows, const hr::Work& work, Body body,
                        int64_t (*run_of)(const HrPart&, int64_t, int) = run_of) {
  int64_t total = 0;
  for (int32_t i = 0; i < op.count; ++i) {
    const int64_t run = run_of(op.parts[i], rows, work.threads);
    total += (hr::panel_count(op.parts[i].out) + run - 1) / run;
  }
  int victim = 0;
  int64_t item;
  while (work.next_in_line(total, &victim, &item)) {
    for (int32_t i = 0; i < op.count; ++i) {
      const HrPart& part = op.parts[i];
      const int64_t panels = hr::panel_count(part.out), run = run_of(part, rows, work.threads);
      const int64_t items = (panels + run - 1) / run;
      if (item >= items) {
        item -= items;
        continue;
      }
      const int64_t first = item * run, last = first + run < panels ? first + run : panels;
      body(part, first, last);
      break;
    }
  }
}

void op_linear(const HrLinear& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.rows);
  if (rows == 0) return;
  each_run(op, rows, work, [&](const HrPart& part, int64_t first, int64_t last) {
    part_panels(op, part, rows, first, last);
  });
}

}  // namespace

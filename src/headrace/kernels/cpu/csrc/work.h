// What a thread of the team knows while it works on one operator.
#pragma once
#include <stdint.h>

#include "layout.h"

namespace hr {

struct Work {
  const HrStep* step;
  int thread;
  int threads;
  uint8_t* scratch;      // this thread's own, 64-byte aligned
  int64_t* counter;      // shared by the team, zero when the operator starts

  // The next item that nobody has: items are numbered from zero, each goes to one thread.
  HR_ALWAYS int64_t next() const { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

  // An even share of `count` rows, contiguous.
  HR_ALWAYS void share(int64_t count, int64_t* first, int64_t* last) const {
    *first = count * thread / threads;
    *last = count * (thread + 1) / threads;
  }
};

struct Kernels {  // one table per ISA level
  const char* name;
  void (*run)(const HrRecord& record, const Work& work);
  int64_t (*scratch)(const HrRecord& record, const HrStep& limits);
  double (*integer_peak)(int64_t iterations);     // operations done
  uint64_t (*read_stream)(const uint8_t* data, int64_t bytes);
};

}  // namespace hr

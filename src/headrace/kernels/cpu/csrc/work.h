// What a thread of the team knows while it works on one operator.
#pragma once
#include <stdint.h>

#include "layout.h"

namespace hr {

constexpr int64_t kCounterStride = 8;  // int64 per counter: a cache line each

struct Work {
  const HrStep* step;
  int thread;
  int threads;
  uint8_t* scratch;      // this thread's own, 64-byte aligned
  int64_t* counters;     // a cache line per thread, zero when the operator starts
  uint8_t* shared;       // of all threads, 64-byte aligned; may be anything when the operator starts

  // The next item that nobody has: items are numbered from zero, each goes to one thread.
  HR_ALWAYS int64_t next() const { return __atomic_fetch_add(counters, 1, __ATOMIC_RELAXED); }

  // The same for items that lie one after the other in memory: a thread goes through its own
  // share front to back, so that its stream is one, and then helps the others with theirs.
  // `victim` starts as 0. False: all items of `total` are taken.
  HR_ALWAYS bool next_in_line(int64_t total, int* victim, int64_t* item) const {
    for (; *victim < threads; ++*victim) {
      const int owner = (thread + *victim) % threads;
      const int64_t first = total * owner / threads, last = total * (owner + 1) / threads;
      int64_t* counter = counters + owner * kCounterStride;
      if (__atomic_load_n(counter, __ATOMIC_RELAXED) >= last - first) continue;
      *item = first + __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
      if (*item < last) return true;
    }
    return false;
  }

  // How many rows an operator has that says HR_ROWS_N, HR_ROWS_R or HR_ROWS_T.
  HR_ALWAYS int64_t rows(int32_t which) const {
    return which == HR_ROWS_N ? step->n : which == HR_ROWS_R ? step->r : step->t;
  }

  // An even share of `count` rows, contiguous.
  HR_ALWAYS void share(int64_t count, int64_t* first, int64_t* last) const {
    *first = count * thread / threads;
    *last = count * (thread + 1) / threads;
  }
};

template <int code>
struct StructOf;
#define HR_EACH(NAME, CODE, STRUCT) \
  template <>                       \
  struct StructOf<CODE> {           \
    using Type = STRUCT;            \
  };
HR_OPS(HR_EACH)
#undef HR_EACH

// What a record of this code is about.
template <int code>
HR_ALWAYS const auto& op_of(const HrRecord& record) {
  return *static_cast<const typename StructOf<code>::Type*>(record.op);
}

struct Room {  // bytes of work space
  int64_t each, shared;  // for each thread, and for all of them together
};

struct Kernels {  // one table per ISA level
  const char* name;
  void (*run)(const HrRecord& record, const Work& work);
  Room (*scratch)(const HrRecord& record, const HrStep& step, int threads);
  double (*integer_peak)(int64_t iterations);     // operations done
  uint64_t (*read_stream)(const uint8_t* data, int64_t bytes);
};

}  // namespace hr

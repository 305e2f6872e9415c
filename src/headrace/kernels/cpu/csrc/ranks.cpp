#include "ranks.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "pause.h"
#include "wire.h"

namespace hr {
namespace {

constexpr timespec kLook = {0, 20'000'000};  // how long a sleeper may not see that a rank is gone

// Not private: the word lies in memory of several processes.
void futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* most) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, most, nullptr, 0);
}

bool opened(const Fence* fence, uint32_t seen) {
  return fence->phase.load(std::memory_order_acquire) != seen;
}

void wait(Fence* fence, uint32_t seen) {
  for (int i = 0; i < kSpins; ++i) {
    if (opened(fence, seen)) return;
    pause_cpu();
  }
  for (int i = 0; i < kYields; ++i) {
    if (opened(fence, seen)) return;
    sched_yield();
  }
  fence->sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (!opened(fence, seen) && !fence->broken.load(std::memory_order_acquire))
    futex(&fence->phase, FUTEX_WAIT, seen, &kLook);
  fence->sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void open(Fence* fence, uint32_t seen) {
  fence->phase.store(seen + 1, std::memory_order_seq_cst);
  if (fence->sleepers.load(std::memory_order_seq_cst))
    futex(&fence->phase, FUTEX_WAKE, 0x7fffffff, nullptr);
}

Met ended(const Fence* fence) {
  const uint32_t broken = fence->broken.load(std::memory_order_acquire);
  return broken == 0 ? kMet : broken == 2 ? kStrangers : kBroken;
}

}  // namespace

Met await_change(Fence* fence, std::atomic<uint32_t>* word, uint32_t seen) {
  const auto changed = [&] { return word->load(std::memory_order_acquire) != seen; };
  for (int i = 0; i < kSpins && !changed(); ++i) pause_cpu();
  for (int i = 0; i < kYields && !changed(); ++i) sched_yield();
  while (!changed() && ended(fence) == kMet) futex(word, FUTEX_WAIT, seen, &kLook);
  return changed() ? kMet : ended(fence);
}

void wake_all(std::atomic<uint32_t>* word) { futex(word, FUTEX_WAKE, 0x7fffffff, nullptr); }

Met meet(const HrExchange& op, uint32_t sign, const HrStep* step) {
  auto* const fence = static_cast<Fence*>(op.fence);
  const auto ranks = static_cast<uint32_t>(op.ranks);
  if (fence->wire) return fence->wire->exchange(fence, sign, op.pieces, op.count, step);
  if (const Met before = ended(fence); before != kMet) return before;
  const uint32_t seen = fence->phase.load(std::memory_order_acquire);
  fence->signs.fetch_add(sign, std::memory_order_relaxed);
  const auto before = fence->arrived.fetch_add(1, std::memory_order_acq_rel);
  if (before + 1 == ranks) {
    const bool alike =
        fence->signs.exchange(0, std::memory_order_relaxed) == sign * ranks;
    fence->arrived.store(0, std::memory_order_relaxed);
    if (!alike) fence->broken.store(2, std::memory_order_release);
    open(fence, seen);
  } else {
    wait(fence, seen);
  }
  return ended(fence);
}

}  // namespace hr

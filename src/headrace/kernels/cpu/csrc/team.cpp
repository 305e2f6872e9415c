// The thread team: spins a little, then parks; a barrier between operators.
//
// The calling thread is worker 0, so a team of one has no thread of its own. A job wakes the
// others once for a whole program: between its operators they meet at a barrier that costs about
// as much as passing a cache line to and fro (0.2 to 0.4 µs), some two hundred times a step.
// A waiter spins for about 50 µs (the next operator, or the next step, is usually nearer), then
// gives its core away a few times, then sleeps on a futex: an idle engine costs nothing, and on a
// machine where others want the cores too the team does not burn its time slice.
//
// Where others want the cores a barrier waits for a thread that the system has put aside, a time
// slice or several, and two hundred of them make a step of a small model ten times longer than one
// thread would take. So the caller says how long it waited beyond its spinning, and the crew of the
// next program is chosen by that (crew.h).
//
// The sense of the barrier is a phase number that only grows. Threads of the team are not pinned:
// as many of them as there are cores in the affinity mask find their cores by themselves, and a
// pinned one would wait behind a stranger's thread while another core idles (ADR 0023).
//
// After a fork the child has no threads but the caller's: the team notices by its process id and
// starts new ones.
#include "team.h"

#include "crew.h"
#include "pause.h"
#include "handover.h"
#include "ranks.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <initializer_list>
#include <new>

namespace hr {
namespace {

constexpr int kApart = 8;  // doubles of a cache line

#ifdef __SANITIZE_ADDRESS__  // it ends where the records of this job said
constexpr bool kScratchStays = false;
constexpr int64_t kScratchUnit = 64;
#else
constexpr bool kScratchStays = true;
constexpr int64_t kScratchUnit = 4096;
#endif

int64_t futex(std::atomic<uint32_t>* word, int op, uint32_t value, uint32_t whom) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op | FUTEX_PRIVATE_FLAG, value,
                 nullptr, nullptr, whom);
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// A number that threads wait to see change. A sleeper is woken by a call whose `whom` has its bit.
struct Signal {
  alignas(64) std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  uint32_t read() const { return value.load(std::memory_order_acquire); }

  void set(uint32_t next, uint32_t whom) {
    value.store(next, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst))
      futex(&value, FUTEX_WAKE_BITSET, 0x7fffffff, whom);
  }

  // Returns the seconds that were waited beyond the spinning.
  double wait(uint32_t seen, uint32_t bit, int spins) {
    for (int i = 0; i < spins; ++i) {
      if (read() != seen) return 0;
      pause_cpu();
    }
    const double began = now();
    for (int i = 0; i < kYields; ++i) {
      if (read() != seen) return now() - began;
      sched_yield();
    }
    sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (value.load(std::memory_order_seq_cst) == seen)
      futex(&value, FUTEX_WAIT_BITSET, seen, bit);
    sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return now() - began;
  }
};

// The start of a job: its number, and in the low bits how many threads are in it. Who is not in it
// may see it late or never, and reads nothing of it; who is in it sees it, for it ends with them.
// Whoever is in no longer is woken once to see that, so that no one holds an old number for so long
// that it comes again.
constexpr uint32_t kCountBits = 9, kCountMask = (1u << kCountBits) - 1;
constexpr uint32_t kEveryone = 0xffffffffu;

uint32_t bit_of(int thread) { return 1u << (thread < 31 ? thread : 31); }
uint32_t bits_of(int threads) { return threads > 31 ? kEveryone : (1u << threads) - 1; }

}  // namespace

struct Team {
  int threads;
  const Kernels* kernels;
  pid_t process = 0;
  pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;
  pthread_t* handles = nullptr;

  Signal start;  // a job is there
  Signal phase;  // a barrier opened
  alignas(64) std::atomic<int> arrived{0};
  bool stop = false;
  Crews crews{1};

  // The job. Either a task or records, of the first `members` threads.
  int members = 1;
  void (*task)(void*, int, int) = nullptr;
  void* context = nullptr;
  const HrRecord* records = nullptr;
  int count = 0;
  const HrStep* step = nullptr;
  double* seconds = nullptr;
  int met = kMet;  // how this team's meetings with other ranks went

  double* lost = nullptr;  // of each thread: seconds that it waited beyond its spinning

  int64_t* counters = nullptr;
  int64_t counter_room = 0;
  uint8_t* scratch = nullptr;  // of each thread, then what all share
  int64_t scratch_each = 0;
  int64_t scratch_shared = 0;

  // Returns the seconds that were waited beyond the spinning.
  double barrier(int all) {
    if (all == 1) return 0;
    const uint32_t seen = phase.read();
    if (arrived.fetch_add(1, std::memory_order_acq_rel) < all - 1)
      return phase.wait(seen, kEveryone, kSpins);
    arrived.store(0, std::memory_order_relaxed);
    phase.set(seen + 1, kEveryone);
    return 0;
  }

  // Behind a meeting that failed the others are not waited for: what is computed is lost.
  Met exchange(const HrRecord& record) const {
    if (record.code == HR_OP_HANDOVER)
      return hand_over(op_of<HR_OP_HANDOVER>(record), step);
    const auto& op = op_of<HR_OP_EXCHANGE>(record);
    const auto sign = static_cast<uint32_t>(op.place + 1) * 2654435761u +
                      static_cast<uint32_t>(step->n) * 40503u + static_cast<uint32_t>(step->r);
    return meet(op, sign, step);
  }

  double work(int thread) {
    // A copy of the job: once the last barrier opens, the caller may fill in the next one.
    const int all = members;
    if (task) {
      task(context, thread, all);
      return barrier(all);
    }
    const int total = count;
    const HrRecord* const list = records;
    double* const times = seconds;
    Work w{step, thread, all, scratch + thread * scratch_each, counters,
           scratch + threads * scratch_each};
    double waited = 0;
    for (int i = 0; i < total; ++i, w.counters += all * kCounterStride) {
      const double began = times && thread == 0 ? now() : 0;
      if (list[i].code != HR_OP_EXCHANGE && list[i].code != HR_OP_HANDOVER) kernels->run(list[i], w);
      else if (thread == 0 && met == kMet) met = exchange(list[i]);
      if (i + 1 == total) lost[thread * kApart] = waited;
      waited += barrier(all);
      if (times && thread == 0) times[i] = now() - began;
    }
    return waited;
  }
};

namespace {

struct Entry {
  Team* team;
  int thread;
};

void* thread_main(void* argument) {
  Entry entry = *static_cast<Entry*>(argument);
  delete static_cast<Entry*>(argument);
  Team* team = entry.team;
  uint32_t seen = 0;
  for (;;) {
    const bool member = static_cast<int>(seen & kCountMask) > entry.thread;
    team->start.wait(seen, bit_of(entry.thread), member ? kSpins : 0);
    seen = team->start.read();
    if (static_cast<int>(seen & kCountMask) <= entry.thread) continue;
    if (team->stop) return nullptr;
    team->work(entry.thread);
  }
}

void start_threads(Team* team) {
  team->process = getpid();
  team->start.value.store(0);
  team->start.sleepers.store(0);
  team->phase.sleepers.store(0);
  team->arrived.store(0);
  team->stop = false;
  // Signals are for the process's own threads, but for those that a thread raises itself.
  sigset_t all, before;
  sigfillset(&all);
  for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, own);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int started = 1;
  for (int i = 1; i < team->threads; ++i) {
    auto* entry = new (std::nothrow) Entry{team, i};
    if (!entry || pthread_create(&team->handles[i], nullptr, thread_main, entry) != 0) {
      delete entry;
      break;
    }
    ++started;
  }
  team->threads = started;  // fewer where the system refused: slower, still right
  team->crews = Crews(started);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void call(Team* team, int members) {
  const uint32_t last = team->start.read(), number = (last >> kCountBits) + 1;
  const bool fewer = members < static_cast<int>(last & kCountMask);
  team->start.set(number << kCountBits | static_cast<uint32_t>(members),
                  fewer ? kEveryone : bits_of(members));
}

// Run the job. Returns the seconds that the caller waited for others beyond its spinning.
double launch(Team* team, int members) {
  team->members = members;
  if (members > 1) call(team, members);
  return team->work(0);
}

bool make_room(Team* team, const HrRecord* records, int count, const HrStep* step, int members) {
  const int64_t counters = static_cast<int64_t>(count) * members;
  if (counters > team->counter_room) {
    free(team->counters);
    team->counters = static_cast<int64_t*>(
        aligned_alloc(64, static_cast<size_t>(counters * kCounterStride) * sizeof(int64_t)));
    team->counter_room = team->counters ? counters : 0;
    if (!team->counters) return false;
  }
  memset(team->counters, 0, static_cast<size_t>(counters * kCounterStride) * sizeof(int64_t));
  Room need{kScratchUnit, 0};
  for (int i = 0; i < count; ++i) {
    const Room one = team->kernels->scratch(records[i], *step, members);
    if (one.each > need.each) need.each = one.each;
    if (one.shared > need.shared) need.shared = one.shared;
  }
  const auto whole = [](int64_t bytes) {
    return (bytes + kScratchUnit - 1) / kScratchUnit * kScratchUnit;
  };
  int64_t each = whole(need.each), shared = whole(need.shared);
  if (each == team->scratch_each && shared == team->scratch_shared) return true;
  if (kScratchStays) {
    if (each <= team->scratch_each && shared <= team->scratch_shared) return true;
    if (each < team->scratch_each) each = team->scratch_each;
    if (shared < team->scratch_shared) shared = team->scratch_shared;
  }
  free(team->scratch);
  team->scratch = static_cast<uint8_t*>(
      aligned_alloc(kScratchUnit, static_cast<size_t>(each * team->threads + shared)));
  team->scratch_each = team->scratch ? each : 0;
  team->scratch_shared = team->scratch ? shared : 0;
  return team->scratch != nullptr;
}

}  // namespace

Team* team_new(int threads, const Kernels* kernels) {
  auto* team = new (std::nothrow) Team;
  if (!team) return nullptr;
  team->threads = threads < 1 ? 1 : threads;
  team->kernels = kernels;
  const auto size = static_cast<size_t>(team->threads);
  team->handles = static_cast<pthread_t*>(calloc(size, sizeof(pthread_t)));
  team->lost = static_cast<double*>(calloc(size, kApart * sizeof(double)));
  if (!team->handles || !team->lost) {
    free(team->handles);
    free(team->lost);
    delete team;
    return nullptr;
  }
  start_threads(team);
  return team;
}

void team_free(Team* team) {
  if (!team) return;
  if (team->process == getpid()) {
    team->stop = true;
    call(team, team->threads);
    for (int i = 1; i < team->threads; ++i) pthread_join(team->handles[i], nullptr);
  }
  free(team->handles);
  free(team->lost);
  free(team->counters);
  free(team->scratch);
  delete team;
}

int team_threads(const Team* team) { return team->threads; }
const Kernels* team_kernels(const Team* team) { return team->kernels; }

int team_run(Team* team, const HrRecord* records, int count, const HrStep* step,
             double* seconds) {
  if (team->process != getpid()) {
    pthread_mutex_init(&team->running, nullptr);
    start_threads(team);
  }
  pthread_mutex_lock(&team->running);
  Crew& crew = team->crews.of(records);
  const int members = crew.members;
  const double began = crew.most > 1 ? now() : 0;
  if (!make_room(team, records, count, step, members)) {
    pthread_mutex_unlock(&team->running);
    return -1;
  }
  team->task = nullptr;
  team->records = records;
  team->count = count;
  team->step = step;
  team->seconds = seconds;
  team->met = kMet;
  double waited = launch(team, members);
  // Whoever is put aside waits for nobody, and all others for him: the caller, too.
  for (int i = 1; i < members; ++i) waited += team->lost[i * kApart];
  if (members > 1) waited /= members - 1;
  if (crew.most > 1) crew.judge(began, now(), waited, static_cast<double>(step->n));
  const int met = team->met;
  pthread_mutex_unlock(&team->running);
  return met;
}

void team_each(Team* team, void (*task)(void*, int, int), void* context) {
  if (team->process != getpid()) {
    pthread_mutex_init(&team->running, nullptr);
    start_threads(team);
  }
  pthread_mutex_lock(&team->running);
  team->task = task;
  team->context = context;
  launch(team, team->threads);
  team->task = nullptr;
  pthread_mutex_unlock(&team->running);
}

}  // namespace hr

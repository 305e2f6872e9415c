// Runs the CPU kernels for a sanitizer: every kind of weight at every number of rows in memory of
// exactly the right size, every operator at random shapes and strides (fuzz.h), and the thread
// team at its worst.
//
//   driver [rounds [seed]]   everything; the last line says "all right", the exit status is 0
//
// Built by the target `kernels_sanitized` of CMakeLists.txt with one ISA level, HR_DRIVEN. What a
// sanitizer finds ends the process; what the driver itself finds (different bits) does too.
#include <pthread.h>
#include <unistd.h>

#include <initializer_list>

#include "crew.h"
#include "fuzz.h"
#include "levels.h"
#include "team.h"

namespace hr {
const Kernels* choose_kernels(const char*) { return &HR_DRIVEN; }
LevelState state_of(const char*) { return kServes; }
extern const char* const built_levels = "";
const char* amx_refused() { return "one level was built"; }
/// As on the processors where it makes a difference.
extern const Fetching fetching = {true, true};
}  // namespace hr

namespace {

void run(void* team, const HrRecord* records, int count, int rows) {
  HrStep step{};
  step.n = step.r = rows;
  CHECK(hr_run(team, records, count, &step, nullptr) == 0);
}

// y = x · wᵀ + bias for the first `rows` rows of x.
void product(void* team, const Weight& w, const float* x, const float* bias, int rows, float* y) {
  Codes codes(rows, (w.in + 31) / 32 * 32);
  const bool dense = w.kind >= HR_F32;
  HrQuantise quantise{x, w.in, codes.q, nullptr, w.in, HR_ROWS_N};
  HrPart part = w.part(y, w.out, bias, false);
  HrLinear linear{codes.q, dense ? x : nullptr, w.in, &part, 1, HR_ROWS_N};
  HrRecord records[] = {{HR_OP_QUANTISE, 0, &quantise}, {HR_OP_LINEAR, 0, &linear}};
  run(team, records + dense, 2 - dense, rows);
}

void products(void* const* teams, int team_count) {
  constexpr int kMost = 33, kOut = 49;
  for (const Kind& kind : kKinds) {
    const int in = kind.span == 1 ? 37 : 256;
    Weight w(teams[0], kind, kOut, in);
    Block<float> x(kMost * in), bias(kOut), want(kMost * kOut);
    for (int i = 0; i < kMost * in; ++i) x.data[i] = random_float();
    for (int i = 0; i < kOut; ++i) bias.data[i] = random_float();
    product(teams[0], w, x.data, bias.data, kMost, want.data);
    for (int rows = 1; rows < kMost; ++rows) {
      Block<float> exact(rows * in), y(rows * kOut);
      memcpy(exact.data, x.data, exact.bytes);
      product(teams[rows % team_count], w, exact.data, bias.data, rows, y.data);
      CHECK(memcmp(y.data, want.data, y.bytes) == 0);
    }
  }
}

void gates(void* team) {
  constexpr int kOut = 96, kIn = 256;
  for (const Kind& kind : kKinds) {
    if (kind.kind >= HR_F32 || kind.kind == HR_Q8_0_PLANES) continue;
    Weight gate(team, kind, kOut, kIn), up(team, kind, kOut, kIn);
    for (int rows : {1, 5, 8, 19}) {
      Block<float> x(rows * kIn);
      for (int i = 0; i < rows * kIn; ++i) x.data[i] = random_float();
      Codes codes(rows, kIn), inner(rows, kOut);
      HrQuantise quantise{x.data, kIn, codes.q, nullptr, kIn, HR_ROWS_N};
      HrGateUp op{codes.q, gate.part(nullptr, 0, nullptr, false),
                  up.part(nullptr, 0, nullptr, false), inner.q, rows % 3, 0};
      HrRecord records[] = {{HR_OP_QUANTISE, 0, &quantise}, {HR_OP_GATE_UP, 0, &op}};
      run(team, records, 2, rows);
    }
  }
}

// The best output of each row without a matrix: of odd shapes, against the product's own.
void heads(void* team, int threads) {
  for (const Kind& kind : kKinds) {
    constexpr int kIn = 256, kOut = 83, kStride = 16;
    Weight weight(team, kind, kOut, kIn);
    const int bounded = kind.kind == HR_Q8_0_PLANES ? HR_BOUNDED : 0;
    for (int rows : {1, 4, 7, 13}) {
      Block<float> x(rows * kIn), y(rows * kOut);
      Block<float> bounds(bounded * ((kOut + 15) / 16)), lower(threads * kStride);
      Block<HrWorth> worth(threads);
      memset(worth.data, 0, worth.bytes);
      Block<HrBest> best(threads * kStride);
      Block<int64_t> tokens(rows);
      for (int i = 0; i < rows * kIn; ++i) x.data[i] = random_float();
      Codes codes(rows, kIn);
      HrQuantise quantise{x.data, kIn, codes.q, nullptr, kIn, HR_ROWS_N};
      HrPart part = weight.part(y.data, kOut, nullptr, false);
      HrLinear linear{codes.q, x.data, kIn, &part, 1, HR_ROWS_N};
      HrHead head{linear,      best.data,  kStride,    tokens.data,
                  bounds.data, lower.data, worth.data, bounded,
                  nullptr,     0,          nullptr,    1,
                  0};
      HrRecord records[] = {{HR_OP_QUANTISE, 0, &quantise},
                            {HR_OP_LINEAR, 0, &linear},
                            {HR_OP_BOUND, 0, &head},
                            {HR_OP_BEST, 0, &head},
                            {HR_OP_PICK, 0, &head}};
      run(team, records, 5, rows);
      for (int r = 0; r < rows; ++r) {
        int64_t highest = 0;
        for (int o = 1; o < kOut; ++o)
          if (y.data[r * kOut + o] > y.data[r * kOut + highest]) highest = o;
        CHECK(tokens.data[r] == highest);
      }
    }
  }
}

// ---- the team: what it does between operators and between jobs

struct Chain {  // `length` sums of a vector with itself: jobs whose end one can check
  Block<float> x, y;
  HrRowsOp op;
  HrRecord* records;
  int length;
  explicit Chain(int length_) : x(48), y(48), length(length_) {
    for (int i = 0; i < 48; ++i) x.data[i] = 1;
    op = HrRowsOp{x.data, 16, y.data, 16, 16, HR_ROWS_N, 1, 0};
    records = static_cast<HrRecord*>(calloc(static_cast<size_t>(length), sizeof(HrRecord)));
    for (int i = 0; i < length; ++i) records[i] = {HR_OP_ADD, 0, &op};
  }
  ~Chain() { free(records); }
  void go(void* team) {
    memset(y.data, 0, y.bytes);
    run(team, records, length, 3);
    for (int i = 0; i < 48; ++i) CHECK(y.data[i] == static_cast<float>(length));
  }
};

// A thread that leaves a job late must not read the next one's list: it once did.
void quick_jobs(void* team, int times) {
  Chain chains[3] = {Chain(1), Chain(40), Chain(3)};
  for (int i = 0; i < times; ++i) chains[i % 3].go(team);
}

struct Guest {
  void* team;  // null: one of its own, made anew again and again
  int times;
};

void* guest(void* argument) {
  const Guest& g = *static_cast<Guest*>(argument);
  if (g.team) {
    quick_jobs(g.team, g.times);
    return nullptr;
  }
  for (int i = 0; i < g.times; ++i) {
    void* team = hr_team_new(1 + i % 3, nullptr);
    CHECK(team);
    quick_jobs(team, 4);
    hr_team_free(team);
  }
  return nullptr;
}

void teams_at_once(void* shared) {
  Guest guests[3] = {{shared, 120}, {shared, 120}, {nullptr, 20}};
  pthread_t threads[3];
  for (int i = 0; i < 3; ++i) CHECK(!pthread_create(&threads[i], nullptr, guest, &guests[i]));
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
}

// ---- the crew: by a clock of our own, then with threads that are late on purpose

void crews() {
  hr::Crew crew(5);
  constexpr double window = hr::kWindow;
  double clock = 0;
  const auto program = [&](double seconds, double lost) {
    crew.judge(clock, clock + seconds, lost, 1e3 * seconds);
    clock += seconds;
    return crew.members;
  };
  for (int i = 0; i < 100; ++i) CHECK(program(2.5 * window, window) == 5);  // late, but worth it
  CHECK(program(window / 4, window / 4) == 5);  // too short to be judged alone
  for (int i = 0; i < 3; ++i) CHECK(program(window / 4, 0) == 5);
  for (int members : {3, 2, 1}) CHECK(program(2.5 * window, 1.5 * window) == members);
  const double alone = clock;
  while (program(1e-3, 0) == 1) CHECK(clock < alone + hr::kLongestRest);
  CHECK(crew.members == 2 && clock >= alone + 4 * hr::kShortestRest - 1e-9);
  CHECK(program(2.5 * window, 2.25 * window) == 1);  // still late: a longer rest
  const double again = clock;
  while (program(1e-3, 0) == 1) CHECK(clock < again + hr::kLongestRest);
  CHECK(clock >= again + 8 * hr::kShortestRest - 1e-9);
  for (int members : {3, 5, 5}) CHECK(program(1.25 * window, 0) == members);
  for (int i = 0; i < 20; ++i) {  // never none, never a rest without end
    while (crew.members > 1) program(1, 1);
    CHECK(crew.rest <= hr::kLongestRest);
    clock += 2 * hr::kLongestRest;
    CHECK(program(1.25 * window, 0) == 2);
  }
  hr::Crew lone(1);
  lone.judge(0, 1, 0, 1);
  CHECK(lone.members == 1);
}

// One that is late and yet faster than its half stays, until that is long ago.
void crews_that_are_faster() {
  hr::Crew crew(2);
  double clock = 0;
  const auto program = [&](double seconds, double lost) {
    crew.judge(clock, clock + seconds, lost, 8);
    clock += seconds;
    return crew.members;
  };
  CHECK(program(0.10, 0.06) == 1);
  CHECK(program(0.12, 0) == 2);  // slower: back at once
  for (int i = 0; i < 4; ++i) CHECK(program(0.10, 0.06) == 2);
  clock += 2 * hr::kLongestRest;
  CHECK(program(0.10, 0.06) == 1);
  CHECK(program(0.06, 0) == 1);  // now it is faster
  // Programs of other sizes are not compared.
  hr::Crew other(2);
  other.judge(0, 1, 0.6, 8);
  CHECK(other.members == 1);
  other.judge(1, 1.05, 0, 1);
  CHECK(other.members == 1);
  // Two programs of one team know nothing of each other.
  hr::Crews crews(2);
  alignas(64) int one[16] = {}, two[16] = {};
  crews.of(one).judge(0, 1, 0.6, 1);
  CHECK(crews.of(one).members == 1);
  CHECK(crews.of(two).members == 2);
}

struct Seen {
  int late;  // microseconds that all but the caller take
  int came, threads;
};

// Stands in for the kernels: one record tells who came.
void note(const HrRecord& record, const hr::Work& work) {
  Seen& seen = *static_cast<Seen*>(const_cast<void*>(static_cast<const void*>(record.op)));
  __atomic_fetch_add(&seen.came, 1, __ATOMIC_RELAXED);
  if (work.thread == 0) seen.threads = work.threads;
  else if (seen.late) usleep(static_cast<useconds_t>(seen.late));
}

// Every thread of a crew comes once for every record, while the crew shrinks and grows.
void late_threads() {
  const hr::Kernels kernels{"late", note,
                            [](const HrRecord&, const HrStep&, int) { return hr::Room{64, 0}; },
                            nullptr, nullptr};
  hr::Team* team = hr::team_new(4, &kernels);
  CHECK(team);
  HrStep step{};
  Seen seen;
  const HrRecord records[] = {{0, 0, &seen}, {0, 0, &seen}, {0, 0, &seen}};
  const auto job = [&](int late) {
    seen = {late, 0, 0};
    CHECK(hr::team_run(team, records, 3, &step, nullptr) == 0);
    CHECK(seen.came == 3 * seen.threads);
    return seen.threads;
  };
  for (int tries = 0; job(8000) > 1; ++tries) CHECK(tries < 1000);
  for (int i = 0; i < 2000; ++i) {
    job(i % 200 < 40 ? 8000 : 0);
    if (i % 200 > 40) usleep(100);
  }
  hr::team_free(team);
}

}  // namespace

int main(int count, char** arguments) {
  const int rounds = count > 1 ? atoi(arguments[1]) : 60;
  if (count > 2) g_state ^= static_cast<uint64_t>(atoll(arguments[2])) << 20;
  crews();
  crews_that_are_faster();
  late_threads();
  void* teams[3];
  for (int i = 0; i < 3; ++i) CHECK(teams[i] = hr_team_new(i + 1, nullptr));
  products(teams, 3);
  gates(teams[1]);
  heads(teams[2], 3);
  fuzz::everything(teams, 3, rounds);
  quick_jobs(teams[2], 300);
  teams_at_once(teams[1]);
  for (void* team : teams) hr_team_free(team);
  puts("all right");
  return 0;
}

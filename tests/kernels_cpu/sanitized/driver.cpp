// Runs the CPU kernels for a sanitizer: every kind of weight at odd shapes in memory of exactly
// the right size, the operators around the products, and the thread team at its worst.
//
//   driver            everything; the last line says "all right", the exit status is 0
//
// Built by the target `kernels_sanitized` of CMakeLists.txt with one ISA level (the sanitizers see
// intrinsics, not the bits that differ between levels, and one level compiles in seconds). What a
// sanitizer finds ends the process; what the driver itself finds (different bits) does too.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>

#include "levels.h"
#include "records.h"

extern "C" {
void* hr_team_new(int32_t threads, const char* wish);
void hr_team_free(void* team);
int32_t hr_run(void* team, const HrRecord* records, int32_t count, const HrStep* step,
               double* seconds);
int64_t hr_packed_bytes(int32_t kind, int64_t out, int64_t in);
void hr_pack(void* team, int32_t kind, const uint8_t* rows, int64_t row_bytes, int64_t out,
             int64_t in, uint8_t* target);
}

namespace hr {
const Kernels* choose_kernels(const char*) { return &k_avx2; }
}  // namespace hr

namespace {

#define CHECK(condition)                                         \
  do {                                                           \
    if (!(condition)) {                                          \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                   \
    }                                                            \
  } while (0)

// Memory of exactly `count` values: a read past its end is a finding.
template <class T>
struct Block {
  T* data;
  size_t bytes;
  explicit Block(int64_t count) : bytes(static_cast<size_t>(count) * sizeof(T)) {
    void* at = nullptr;
    CHECK(posix_memalign(&at, 64, bytes ? bytes : 1) == 0);
    data = static_cast<T*>(at);
    memset(at, 0, bytes);
  }
  ~Block() { free(data); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
};

uint64_t g_state = 88172645463325252ull;  // Marsaglia's xorshift64
uint64_t random64() {
  g_state ^= g_state << 13;
  g_state ^= g_state >> 7;
  return g_state ^= g_state << 17;
}
float random_float() { return static_cast<float>(random64() >> 40) * 0x1p-23f - 1.0f; }

struct Kind {
  int kind, span, bytes;
  int halves[2];  // where its fp16 numbers are, −1: none
};
constexpr Kind kKinds[] = {
    {HR_Q4_0, 32, 18, {0, -1}},   {HR_Q4_1, 32, 20, {0, 2}},   {HR_Q5_0, 32, 22, {0, -1}},
    {HR_Q5_1, 32, 24, {0, 2}},    {HR_Q8_0, 32, 34, {0, -1}},  {HR_Q4_K, 256, 144, {0, 2}},
    {HR_Q5_K, 256, 176, {0, 2}},  {HR_Q6_K, 256, 210, {208, -1}}, {HR_F32, 1, 4, {-1, -1}},
    {HR_F16, 1, 2, {0, -1}},      {HR_BF16, 1, 2, {0, -1}}};

struct Weight {
  int kind, out, in;
  Block<uint8_t> panels;
  Weight(void* team, const Kind& k, int out_, int in_)
      : kind(k.kind), out(out_), in(in_), panels(hr_packed_bytes(k.kind, out_, in_)) {
    const int64_t row = static_cast<int64_t>(in) / k.span * k.bytes;
    Block<uint8_t> file(row * out);
    for (int64_t i = 0; i < row * out; ++i) file.data[i] = static_cast<uint8_t>(random64());
    for (int64_t b = 0; b < row * out; b += k.bytes) {
      if (k.kind == HR_F32) {
        const float x = random_float();
        memcpy(file.data + b, &x, 4);
      }
      for (int at : k.halves)
        if (at >= 0) file.data[b + at + 1] = static_cast<uint8_t>(0x20 | (random64() & 0x83));
    }
    hr_pack(team, kind, file.data, row, out, in, panels.data);
  }
  HrPart part(float* y, int64_t stride, const float* bias, bool accumulate) const {
    return {panels.data, bias, y, stride, kind, out, in, accumulate};
  }
};

struct Codes {
  Block<HrSix> six;
  HrQuantised q;
  Codes(int rows, int width)
      : six(static_cast<int64_t>((rows + HR_SIX - 1) / HR_SIX) * (width / 32)),
        q{six.data, width / 32} {}
};

void run(void* team, const HrRecord* records, int count, int rows) {
  HrStep step{};
  step.n = step.r = rows;
  CHECK(hr_run(team, records, count, &step, nullptr) == 0);
}

// y = x · wᵀ + bias for the first `rows` rows of x.
void product(void* team, const Weight& w, const float* x, const float* bias, int rows, float* y) {
  Codes codes(rows, (w.in + 31) / 32 * 32);
  const bool dense = w.kind >= HR_F32;
  HrQuantise quantise{x, w.in, codes.q, w.in, HR_ROWS_N};
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
    if (kind.kind >= HR_F32) continue;
    Weight gate(team, kind, kOut, kIn), up(team, kind, kOut, kIn);
    for (int rows : {1, 5, 8, 19}) {
      Block<float> x(rows * kIn);
      for (int i = 0; i < rows * kIn; ++i) x.data[i] = random_float();
      Codes codes(rows, kIn), inner(rows, kOut);
      HrQuantise quantise{x.data, kIn, codes.q, kIn, HR_ROWS_N};
      HrGateUp op{codes.q, gate.part(nullptr, 0, nullptr, false),
                  up.part(nullptr, 0, nullptr, false), inner.q, rows % 3, 0};
      HrRecord records[] = {{HR_OP_QUANTISE, 0, &quantise}, {HR_OP_GATE_UP, 0, &op}};
      run(team, records, 2, rows);
    }
  }
}

// Norm with residual at odd widths, and to codes.
void norms(void* team) {
  for (int width : {1, 7, 33, 96}) {
    constexpr int kRows = 5;
    Block<float> x(kRows * width), residual(kRows * width), weight(width), y(kRows * width);
    for (int i = 0; i < kRows * width; ++i) x.data[i] = residual.data[i] = random_float();
    Codes codes(kRows, (width + 31) / 32 * 32);
    HrNorm op{x.data, width, residual.data, width, weight.data, y.data, width,
              width % 32 ? HrQuantised{nullptr, 0} : codes.q, 1e-6f, 1.0f, width, HR_ROWS_N};
    HrRecord record{HR_OP_NORM, 0, &op};
    run(team, &record, 1, kRows);
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
    op = HrRowsOp{x.data, 16, y.data, 16, 16, HR_ROWS_N, 0, 0};
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

}  // namespace

int main() {
  void* teams[3];
  for (int i = 0; i < 3; ++i) CHECK(teams[i] = hr_team_new(i + 1, nullptr));
  products(teams, 3);
  gates(teams[1]);
  norms(teams[2]);
  quick_jobs(teams[2], 300);
  teams_at_once(teams[1]);
  for (void* team : teams) hr_team_free(team);
  puts("all right");
  return 0;
}

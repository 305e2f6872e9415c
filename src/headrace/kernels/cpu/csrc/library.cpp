// What Python calls, as library.h describes it.
#include "library.h"

#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "layout.h"
#include "levels.h"
#include "pack.h"
#include "ranks.h"
#include "wire.h"
#include "team.h"

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

hr::Team* as_team(void* team) { return static_cast<hr::Team*>(team); }

struct PackJob {
  int kind;
  const uint8_t* rows;
  int64_t row_bytes, out, in;
  hr::CodedRows coded;  // of no codes: these are rows of blocks or of numbers
  uint8_t* target;
};

void pack_share(void* context, int thread, int threads) {
  const auto& job = *static_cast<PackJob*>(context);
  const int64_t panels = hr::panel_count(job.out);
  const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
  if (job.coded.codes)
    return hr::pack_coded(job.kind, job.coded, job.out, job.in, first, last, job.target);
  hr::pack_panels(job.kind, job.rows, job.row_bytes, job.out, job.in, first, last, job.target);
}

struct ProbeJob {
  const hr::Kernels* kernels;
  const uint8_t* data;
  int64_t amount;
  double result[256];
};

void read_share(void* context, int thread, int threads) {
  auto& job = *static_cast<ProbeJob*>(context);
  const int64_t each = job.amount / threads / 4096 * 4096;
  job.result[thread] =
      static_cast<double>(job.kernels->read_stream(job.data + thread * each, each));
}

void peak_share(void* context, int thread, int) {
  auto& job = *static_cast<ProbeJob*>(context);
  job.result[thread] = job.kernels->integer_peak(job.amount);
}

}  // namespace

const char* hr_sources() { return HR_SOURCES; }

const char* hr_level(const char* wish) {
  const hr::Kernels* kernels = hr::choose_kernels(wish);
  return kernels ? kernels->name : nullptr;
}

const char* hr_amx_refused() { return hr::amx_refused(); }

int32_t hr_level_state(const char* name) { return hr::state_of(name); }

const char* hr_built() { return hr::built_levels; }

void* hr_team_new(int32_t threads, const char* wish) {
  const hr::Kernels* kernels = hr::choose_kernels(wish);
  if (!kernels || threads < 1 || threads > 256) return nullptr;
  return hr::team_new(threads, kernels);
}

void hr_team_free(void* team) { hr::team_free(as_team(team)); }

int32_t hr_team_threads(void* team) { return hr::team_threads(as_team(team)); }

int32_t hr_run(void* team, const HrRecord* records, int32_t count, const HrStep* step,
               double* seconds) {
  return hr::team_run(as_team(team), records, count, step, seconds);
}

int32_t hr_meet(void* fence, int32_t ranks, uint32_t sign) {
  const HrExchange alone = {fence, nullptr, ranks, 0, 0, 0};
  return hr::meet(alone, sign, nullptr);
}

void hr_wire(void* fence, int32_t ranks, int32_t rank, int32_t stages, const int32_t* sockets) {
  static_cast<hr::Fence*>(fence)->wire = new hr::Wire(ranks, rank, stages, sockets);
}

int32_t hr_wire_culprit(void* fence) {
  const auto* wire = static_cast<hr::Fence*>(fence)->wire;
  return wire ? wire->culprit.load() : -1;
}

void hr_wire_free(void* fence) {
  auto& wire = static_cast<hr::Fence*>(fence)->wire;
  delete wire;
  wire = nullptr;
}

int64_t hr_packed_bytes(int32_t kind, int64_t out, int64_t in) {
  const hr::Format* f = hr::format_of(kind);
  if (out < 1 || in < 1) return -1;
  if (f && in % f->span) return -1;
  if (!f && kind != HR_F32 && kind != HR_F16 && kind != HR_BF16 && kind != HR_E4M3) return -1;
  return hr::panel_count(out) * hr::panel_bytes(kind, in);
}

void hr_pack(void* team, int32_t kind, const uint8_t* rows, int64_t row_bytes, int64_t out,
             int64_t in, uint8_t* target) {
  PackJob job{kind, rows, row_bytes, out, in, {}, target};
  hr::team_each(as_team(team), pack_share, &job);
}

void hr_pack_coded(void* team, int32_t kind, const uint8_t* codes, const void* scales,
                   const uint8_t* zeros, int64_t group, int64_t out, int64_t in, uint8_t* target) {
  PackJob job{kind, nullptr, 0, out, in, {codes, scales, zeros, group}, target};
  hr::team_each(as_team(team), pack_share, &job);
}

double hr_probe_read(void* team, const uint8_t* data, int64_t bytes) {
  ProbeJob job{hr::team_kernels(as_team(team)), data, bytes, {}};
  const double began = now();
  hr::team_each(as_team(team), read_share, &job);
  return static_cast<double>(bytes) / (now() - began);
}

double hr_probe_int8(void* team, int64_t iterations) {
  ProbeJob job{hr::team_kernels(as_team(team)), nullptr, iterations, {}};
  const double began = now();
  hr::team_each(as_team(team), peak_share, &job);
  double total = 0;
  for (int i = 0; i < hr::team_threads(as_team(team)); ++i) total += job.result[i];
  return total / (now() - began);
}

void* hr_alloc(int64_t bytes) {
  const size_t huge = 2u << 20;
  const size_t size = (static_cast<size_t>(bytes) + huge - 1) / huge * huge;
  void* raw = mmap(nullptr, size + huge, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const uintptr_t at = reinterpret_cast<uintptr_t>(raw), up = (at + huge - 1) / huge * huge;
  if (up > at) munmap(raw, up - at);
  if (huge - (up - at)) munmap(reinterpret_cast<void*>(up + size), huge - (up - at));
  madvise(reinterpret_cast<void*>(up), size, MADV_HUGEPAGE);
  return reinterpret_cast<void*>(up);
}

void hr_release(void* data, int64_t bytes) {
  const size_t huge = 2u << 20;
  munmap(data, (static_cast<size_t>(bytes) + huge - 1) / huge * huge);
}

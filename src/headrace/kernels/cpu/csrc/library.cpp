// What Python calls: kernels/cpu/library.py declares the same functions to ctypes.
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "heads.h"
#include "layout.h"
#include "levels.h"
#include "mixture.h"
#include "pack.h"
#include "ranks.h"
#include "wire.h"
#include "states.h"
#include "team.h"

#define HR_API extern "C" __attribute__((visibility("default")))

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

// A digest of all sources of the kernels, made by the build.
HR_API const char* hr_sources() { return HR_SOURCES; }

// Raised whenever a record or a function changes its meaning (how panels lie: `LAYOUT`, library.py).
HR_API int32_t hr_version() { return 12; }

// Size of each record, for Python to check its mirror: index as in records.h, −1 beyond.
HR_API int64_t hr_sizeof(int32_t index) {
  const int64_t sizes[] = {sizeof(HrUnit),   sizeof(HrSix),      sizeof(HrQuantised), sizeof(HrPart),
                           sizeof(HrLinear), sizeof(HrEmbed),     sizeof(HrNorm),
                           sizeof(HrQuantise), sizeof(HrGated),   sizeof(HrRowsOp),
                           sizeof(HrKv),     sizeof(HrRope),      sizeof(HrAttention),
                           sizeof(HrGateUp), sizeof(HrRecord), sizeof(HrGroup), sizeof(HrStep),
                           sizeof(HrLoraPart), sizeof(HrLora),    sizeof(HrDrawRow), sizeof(HrDraw),
                           sizeof(HrBest),   sizeof(HrWorth),     sizeof(HrHead),    sizeof(HrRule),
                           sizeof(HrSample), sizeof(HrLayerNorm), sizeof(HrBidirectional),
                           sizeof(HrRoute),  sizeof(HrSpan),      sizeof(HrExperts),
                           sizeof(HrHeads),  sizeof(HrColumns),   sizeof(HrScatter), sizeof(HrConv),
                           sizeof(HrRecurrence), sizeof(HrMultiply),
                           sizeof(HrPiece),  sizeof(HrExchange),
                           sizeof(HrHandover), sizeof(HrAgree),    sizeof(HrDeal)};
  const int32_t count = sizeof(sizes) / sizeof(sizes[0]);
  return index >= 0 && index < count ? sizes[index] : -1;
}

// Name of the level that `wish` (null: the best) selects on this CPU, or null.
HR_API const char* hr_level(const char* wish) {
  const hr::Kernels* kernels = hr::choose_kernels(wish);
  return kernels ? kernels->name : nullptr;
}

// Why the AMX level is not the best here, as half a sentence.
HR_API const char* hr_amx_refused() { return hr::amx_refused(); }

// Why a level does not serve: 0, it does; 1, it was not built; 2, this CPU lacks it; 3, there is none
// of that name.
HR_API int32_t hr_level_state(const char* name) { return hr::state_of(name); }

// The levels that were built, with blanks between them.
HR_API const char* hr_built() { return hr::built_levels; }

HR_API void* hr_team_new(int32_t threads, const char* wish) {
  const hr::Kernels* kernels = hr::choose_kernels(wish);
  if (!kernels || threads < 1 || threads > 256) return nullptr;
  return hr::team_new(threads, kernels);
}

HR_API void hr_team_free(void* team) { hr::team_free(as_team(team)); }

HR_API int32_t hr_team_threads(void* team) { return hr::team_threads(as_team(team)); }

HR_API int32_t hr_run(void* team, const HrRecord* records, int32_t count, const HrStep* step,
                      double* seconds) {
  return hr::team_run(as_team(team), records, count, step, seconds);
}

// Wait at a fence for the other ranks: 0, or why not (ranks.h).
HR_API int32_t hr_meet(void* fence, int32_t ranks, uint32_t sign) {
  const HrExchange alone = {fence, nullptr, ranks, 0, 0, 0};
  return hr::meet(alone, sign, nullptr);
}

// From now on the ranks of a fence, which this process has for itself, meet by sockets (wire.h).
HR_API void hr_wire(void* fence, int32_t ranks, int32_t rank, int32_t stages,
                    const int32_t* sockets) {
  static_cast<hr::Fence*>(fence)->wire = new hr::Wire(ranks, rank, stages, sockets);
}

// The rank at which a fence's wire broke; -1: it did not.
HR_API int32_t hr_wire_culprit(void* fence) {
  const auto* wire = static_cast<hr::Fence*>(fence)->wire;
  return wire ? wire->culprit.load() : -1;
}

HR_API void hr_wire_free(void* fence) {
  auto& wire = static_cast<hr::Fence*>(fence)->wire;
  delete wire;
  wire = nullptr;
}

// Bytes of a packed weight, or −1 when the kind or the shape has no panels.
HR_API int64_t hr_packed_bytes(int32_t kind, int64_t out, int64_t in) {
  const hr::Format* f = hr::format_of(kind);
  if (out < 1 || in < 1) return -1;
  if (f && in % f->span) return -1;
  if (!f && kind != HR_F32 && kind != HR_F16 && kind != HR_BF16 && kind != HR_E4M3) return -1;
  return hr::panel_count(out) * hr::panel_bytes(kind, in);
}

HR_API void hr_pack(void* team, int32_t kind, const uint8_t* rows, int64_t row_bytes, int64_t out,
                    int64_t in, uint8_t* target) {
  PackJob job{kind, rows, row_bytes, out, in, {}, target};
  hr::team_each(as_team(team), pack_share, &job);
}

// The same of codes: see pack.h.
HR_API void hr_pack_coded(void* team, int32_t kind, const uint8_t* codes, const void* scales,
                          const uint8_t* zeros, int64_t group, int64_t out, int64_t in,
                          uint8_t* target) {
  PackJob job{kind, nullptr, 0, out, in, {codes, scales, zeros, group}, target};
  hr::team_each(as_team(team), pack_share, &job);
}

// Bytes a second of one read of `data` by the whole team.
HR_API double hr_probe_read(void* team, const uint8_t* data, int64_t bytes) {
  ProbeJob job{hr::team_kernels(as_team(team)), data, bytes, {}};
  const double began = now();
  hr::team_each(as_team(team), read_share, &job);
  return static_cast<double>(bytes) / (now() - began);
}

// int8 operations a second of the whole team on registers.
HR_API double hr_probe_int8(void* team, int64_t iterations) {
  ProbeJob job{hr::team_kernels(as_team(team)), nullptr, iterations, {}};
  const double began = now();
  hr::team_each(as_team(team), peak_share, &job);
  double total = 0;
  for (int i = 0; i < hr::team_threads(as_team(team)); ++i) total += job.result[i];
  return total / (now() - began);
}

// Memory for weights: zeroed, huge pages where the system gives them. Null when there is none.
HR_API void* hr_alloc(int64_t bytes) {
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

HR_API void hr_release(void* data, int64_t bytes) {
  const size_t huge = 2u << 20;
  munmap(data, (static_cast<size_t>(bytes) + huge - 1) / huge * huge);
}

// The choice among levels. HR_BUILT names those that were compiled in: HR_EACH(avx2) …
#include "levels.h"

#include <string.h>

#include "here.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace hr {
namespace {

struct Level {
  const char* name;
  const Kernels* kernels;   // null: it was not built
  bool runs;                // on this CPU
  bool only_named = false;  // never the best
};

const Kernels* built(const char* name) {
#define HR_EACH(level) \
  if (!strcmp(name, #level)) return &level::kernels;
  HR_BUILT
#undef HR_EACH
  return nullptr;
}

// To each level of this family of processors, the best one first, until one is `found`.
template <class Found>
void each_level(Found found) {
  const Here here;
  const Level levels[] = {
#if defined(__x86_64__)
      {"amx-emulated", built("amx_emulated"), here.bf16, true},
      {"amx", built("amx"), here.tiles(), true},
      {"amx-bf16", built("amx_rounded"), here.tiles(), true},
      {"avx512-bf16", built("rounded"), here.bf16, true},
      {"bf16", built("bf16"), here.bf16},
      {"vnni", built("vnni"), here.vnni},
      {"avx512", built("avx512"), here.avx512},
      {"avx2", built("avx2"), here.avx2},
#else
      {"dotprod", built("dotprod"), here.dotprod},
      {"neon", built("neon"), true},
#endif
  };
  for (const Level& level : levels)
    if (found(level)) return;
}

}  // namespace

#define HR_EACH(level) #level " "
extern const char* const built_levels = HR_BUILT;
#undef HR_EACH

const Kernels* choose_kernels(const char* wish) {
  const bool best = !wish || !*wish;
  const Kernels* chosen = nullptr;
  each_level([&](const Level& level) {
    if (!level.kernels || !level.runs || (best ? level.only_named : strcmp(level.name, wish) != 0))
      return false;
    chosen = level.kernels;
    return true;
  });
  return chosen;
}

LevelState state_of(const char* name) {
  LevelState state = kNoLevel;
  each_level([&](const Level& level) {
    if (strcmp(level.name, name)) return false;
    state = !level.runs ? kNotHere : level.kernels ? kServes : kNotBuilt;
    return true;
  });
  return state;
}

#if defined(__x86_64__)

// Intel's prefetcher loses a stream that is read at full speed, Zen 4's keeps it; Zen 5's follows it
// with fewer lines in flight than memory needs, and what is asked into L2 comes no earlier. It loads
// two vectors a cycle, so that a broadcast costs no more than a product.
Fetching fetching_here() {
  __builtin_cpu_init();
  unsigned a = 0, b, c, d;
  __get_cpuid(1, &a, &b, &c, &d);
  const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
  const bool intel = __builtin_cpu_is("intel"), zen5 = __builtin_cpu_is("amd") && family >= 26;
  return {intel || zen5, zen5, zen5 ? 24 : 12};
}

extern const Fetching fetching = fetching_here();

const char* amx_refused() {
  if (const char* why = tiles_refused()) return why;
  if (!Here().bf16) return "beside AMX the CPU lacks AVX512-BF16";
  return built("amx") ? nullptr : "the level was not built";
}

#else

extern const Fetching fetching = {false, false, 12};

const char* amx_refused() { return "it is for x86-64"; }

#endif

}  // namespace hr

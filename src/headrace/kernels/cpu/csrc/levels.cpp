// The choice among levels: by CPUID on x86-64, by what Linux says of the CPU (AT_HWCAP) on aarch64.
#include "levels.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

#include "tiles_allowed.h"
#elif defined(__aarch64__)
#include <sys/auxv.h>
#else
#error "there are levels for x86-64 and aarch64 only"
#endif

namespace hr {

extern const Kernels k_rounded;

namespace {

struct Level {
  const Kernels* kernels;
  bool runs;        // on this CPU
  bool only_named;  // never the best
};

// The first of `levels`, the best one first, that runs here and is wished for.
template <int N>
const Kernels* first_of(const Level (&levels)[N], const char* wish) {
  const bool best = !wish || !*wish;
  for (const Level& level : levels)
    if (level.runs && (best ? !level.only_named : !strcmp(level.kernels->name, wish)))
      return level.kernels;
  return nullptr;
}

}  // namespace

#if defined(__x86_64__)

// Intel's prefetcher loses a stream that is read at full speed, Zen 4's keeps it; Zen 5's follows it
// with fewer lines in flight than memory needs, and what is asked into L2 comes no earlier.
Fetching fetching_here() {
  __builtin_cpu_init();
  unsigned a = 0, b, c, d;
  __get_cpuid(1, &a, &b, &c, &d);
  const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
  const bool intel = __builtin_cpu_is("intel"), zen5 = __builtin_cpu_is("amd") && family >= 26;
  return {intel || zen5, zen5};
}

extern const Fetching fetching = fetching_here();

const Kernels* choose_kernels(const char* wish) {
  __builtin_cpu_init();  // the builtin also checks that the system saves the registers
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  const Level levels[] = {
#if defined(HR_TEST_AMX)
      {&k_amx_emulated, bf16, true},
#endif
#if defined(HR_HAVE_AMX)
      {&k_amx, bf16 && !tiles_refused(), true},
      {&k_amx_rounded, bf16 && !tiles_refused(), true},
#endif
      {&k_rounded, bf16, true},
      {&k_bf16, bf16, false}, {&k_vnni, vnni, false}, {&k_avx512, avx512, false},
      {&k_avx2, avx2, false}};
  return first_of(levels, wish);
}

const char* amx_refused() {
  if (const char* why = tiles_refused()) return why;
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512bf16")) return "beside AMX the CPU lacks AVX512-BF16";
  return nullptr;
}

#else

extern const Fetching fetching = {false, false};

const Kernels* choose_kernels(const char* wish) {
  [[maybe_unused]] constexpr unsigned long kDotProducts = 1ul << 20;  // HWCAP_ASIMDDP
  const Level levels[] = {
#if defined(HR_HAVE_DOTPROD)
      {&k_dotprod, (getauxval(AT_HWCAP) & kDotProducts) != 0, false},
#endif
      {&k_neon, true, false}};
  return first_of(levels, wish);
}

const char* amx_refused() { return "it is for x86-64"; }

#endif

}  // namespace hr

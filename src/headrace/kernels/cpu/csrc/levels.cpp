// CPUID dispatch. The compiler's builtin also checks that the operating system saves the registers.
#include "levels.h"

#include <string.h>

#include "tiles_allowed.h"

namespace hr {
namespace {

struct Level {
  const Kernels* kernels;
  bool runs;       // on this CPU
  bool only_named; // never the best
};

}  // namespace

const Kernels* choose_kernels(const char* wish) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  const Level levels[] = {  // the best first
#if defined(HR_TEST_AMX)
      {&k_amx_emulated, bf16, true},
#endif
#if defined(HR_HAVE_AMX)
      {&k_amx, bf16 && !tiles_refused(), false},
#endif
      {&k_bf16, bf16, false}, {&k_vnni, vnni, false}, {&k_avx512, avx512, false},
      {&k_avx2, avx2, false}};
  const bool best = !wish || !*wish;
  for (const Level& level : levels)
    if (level.runs && (best ? !level.only_named : !strcmp(level.kernels->name, wish)))
      return level.kernels;
#endif
  return nullptr;
}

const char* amx_refused() {
#if defined(__x86_64__)
  if (const char* why = tiles_refused()) return why;
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") ? nullptr : "beside AMX the CPU lacks AVX512-BF16";
#else
  return "it is for x86-64";
#endif
}

}  // namespace hr

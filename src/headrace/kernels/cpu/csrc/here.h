// What this processor has of what the levels ask for: by CPUID on x86-64, by what Linux says of the
// CPU (AT_HWCAP) on aarch64.
#pragma once

#if defined(__x86_64__)
#include "tiles_allowed.h"
#elif defined(__aarch64__)
#include <sys/auxv.h>
#else
#error "there are levels for x86-64 and aarch64 only"
#endif

namespace hr {

#if defined(__x86_64__)

struct Here {
  bool avx2, avx512, vnni, bf16;

  Here() {
    __builtin_cpu_init();  // the builtins also check that the system saves the registers
    avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
    avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  }

  bool tiles() const { return bf16 && !tiles_refused(); }
};

#else

struct Here {
  bool dotprod = getauxval(AT_HWCAP) >> 20 & 1;  // HWCAP_ASIMDDP
};

#endif

}  // namespace hr

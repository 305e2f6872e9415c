// CPUID dispatch. The compiler's builtin also checks that the operating system saves the registers.
#include "levels.h"

#include <string.h>

namespace hr {

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
  const Kernels* best = bf16 ? &k_bf16 : vnni ? &k_vnni : avx512 ? &k_avx512 : avx2 ? &k_avx2 : nullptr;
  if (!wish || !*wish) return best;
  if (bf16 && !strcmp(wish, "bf16")) return &k_bf16;
  if (vnni && !strcmp(wish, "vnni")) return &k_vnni;
  if (avx512 && !strcmp(wish, "avx512")) return &k_avx512;
  if (avx2 && !strcmp(wish, "avx2")) return &k_avx2;
#endif
  return nullptr;
}

}  // namespace hr

// Run by CMakeLists.txt while it configures: the levels that serve here, the best one and those that
// serve by name, as a list of CMake.
#include "here.h"

#include <stdio.h>

int main() {
  const hr::Here here;
#if defined(__x86_64__)
  // Where not even the least serves it is compiled all the same, so that the library can say so.
  fputs(here.bf16     ? "bf16;rounded"
        : here.vnni   ? "vnni"
        : here.avx512 ? "avx512"
                      : "avx2",
        stdout);
  if (here.tiles()) fputs(";amx", stdout);
#else
  fputs(here.dotprod ? "dotprod" : "neon", stdout);
#endif
}

#if defined(__x86_64__)
#include "tiles_allowed.cpp"
#endif

// Three have a say about tiles: the CPU (CPUID), what registers the system saves (XCR0), and Linux,
// which gives a process room for the 8 KiB of tile data only when it asks (arch_prctl, since 5.16).
//
// The permission is for the process, all its threads and its children. It costs nothing while no
// thread has tiles in use: kernels configure them for one operator and release them at its end.
#include "tiles_allowed.h"

#include <cpuid.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace hr {
namespace {

constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
constexpr uint32_t kTileStates = 3u << 17;   // XTILECFG and XTILEDATA

const char* ask(char* room, size_t size) {
#if !defined(__x86_64__) || !defined(__linux__)
  (void)room, (void)size;
  return "tiles are asked for on Linux on x86-64 only";
#else
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1)) return "the CPU has no AMX";
  if (!(d >> 22 & 1)) return "the CPU's AMX has no bf16 products";
  if (!__get_cpuid_count(0x1d, 1, &a, &b, &c, &d) || (b & 0xffff) < 64 || b >> 16 < 8 ||
      (c & 0xffff) < 16)
    return "the CPU's tiles are smaller than 16 rows of 64 bytes, or fewer than eight";
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d) || !(c >> 27 & 1))
    return "the system has not enabled XSAVE";
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileStates) != kTileStates)
    return "the operating system does not save tiles (XCR0 lacks bits 17 and 18)";
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return nullptr;
  const int failed = errno;
  snprintf(room, size, "Linux gave no permission for tiles (%s)%s", strerror(failed),
           failed == ENOSPC ? ": a thread's signal stack is too small for them" : "");
  return room;
#endif
}

struct Answer {
  char room[160];
  const char* refused;
  Answer() : room{}, refused(ask(room, sizeof room)) {}
};

}  // namespace

const char* tiles_refused() {
  static const Answer answer;
  return answer.refused;
}

}  // namespace hr

// Runs inside the emulator, linked with kernels_amx.cpp's object file as the library has it: calls
// level amx on every case of the memory image (image.py) and compares with what is there.
#include <cpuid.h>
#include <stddef.h>

#include "levels.h"

extern "C" void* memcpy(void* to, const void* from, size_t n) {
  void* result = to;
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n)::"memory");
  return result;
}

extern "C" void* memset(void* to, int value, size_t n) {
  void* result = to;
  __asm__ volatile("rep stosb" : "+D"(to), "+c"(n) : "a"(value) : "memory");
  return result;
}

namespace {

struct Case {
  const HrRecord* record;
  const HrStep* step;
  uint8_t* scratch;
  int64_t* counters;
  const uint8_t *got, *want;
  uint64_t bytes;
  char name[64];
};

struct Image {
  uint64_t count;
  const Case* cases;
};

int others = 0;  // records that the level left to bf16

void port(uint16_t number, char c) { __asm__ volatile("outb %0, %1" ::"a"(c), "Nd"(number)); }

void say(const char* text) {
  while (*text) port(0xe9, *text++);  // Bochs prints what comes there
}

void say(uint64_t number) {
  if (number > 9) say(number / 10);
  port(0xe9, static_cast<char>('0' + number % 10));
}

}  // namespace

namespace hr {
extern const bool lines_are_asked_for = false;
extern const Kernels k_bf16{"none", [](const HrRecord&, const Work&) { ++others; },
                            [](const HrRecord&, const HrStep&) -> int64_t { return 0; }, nullptr,
                            nullptr};
}

extern "C" __attribute__((section(".entry"))) void entry() {
  unsigned a, b, c, d;
  __cpuid_count(7, 0, a, b, c, d);
  say("amx-tile "), say(d >> 24 & 1), say(", amx-int8 "), say(d >> 25 & 1), say("\n");
  const auto& image = *reinterpret_cast<const Image*>(0x10000000);
  uint64_t right = 0;
  for (uint64_t i = 0; i < image.count; ++i) {
    const Case& one = image.cases[i];
    others = 0;
    hr::k_amx.run(*one.record, hr::Work{one.step, 0, 1, one.scratch, one.counters, nullptr});
    uint64_t differ = others ? one.bytes : 0;
    for (uint64_t j = 0; j < one.bytes && !others; ++j) differ += one.got[j] != one.want[j];
    right += differ == 0;
    if (differ) say(one.name), say(": "), say(differ), say(" bytes differ\n");
  }
  say(right), say(" of "), say(image.count), say(" cases have the bits of level bf16\n");
  for (const char* s = "Shutdown"; *s; ++s) port(0x8900, *s);
}

// How a thread waits before it sleeps: it spins, then gives its core away a few times.
#pragma once

namespace {

constexpr int kSpins = 4000;  // some 50 µs
constexpr int kYields = 16;

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else  // `yield` is nothing on most cores; this takes about as long as the other's pause
  __asm__ volatile("isb" ::: "memory");
#endif
}

}  // namespace

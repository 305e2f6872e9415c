// Mixing of two words, which hash tables begin with; seeds are random, since keys are strangers'.

#pragma once

#include <cstdint>

namespace {

inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

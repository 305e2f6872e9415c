// Numbers of half precision in plain arithmetic: for what is done once a block.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

inline float half_to_float(uint16_t h) {
  uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31, fraction = h & 1023;
  uint32_t bits;
  if (exponent == 0) {
    float value = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  } else if (exponent == 31) {
    bits = sign | 0x7f800000u | (fraction << 13);
  } else {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  }
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// The nearest, of two the even one. Not of a NaN.
inline uint16_t float_to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return sign | 0x7c00u;  // 2^16
  if (bits < 0x38800000u) {                        // 2^-14: units of 2^-24, which 0.5's last bit is
    float size;
    memcpy(&size, &bits, 4);
    size += 0.5f;
    memcpy(&bits, &size, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000u);
  }
  bits += 0xc8000fffu + (bits >> 13 & 1);
  return sign | static_cast<uint16_t>(bits >> 13);
}

}  // namespace

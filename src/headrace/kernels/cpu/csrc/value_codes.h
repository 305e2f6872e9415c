// Values of a KV cache in four bits: a head rotated, and each number the nearest of sixteen levels.
//
// What a few large numbers would take from the rest a rotation spreads over all: y = H v, with H the
// Hadamard matrix of as many numbers as the largest power of two that divides E (QuaRot, Ashkboos et
// al. 2024). What comes of it is close to normally distributed, so the levels are those of Lloyd and
// Max for the normal distribution, in 2/93 of its deviation: whole numbers of a signed byte, so that
// products take them as they take codes of int8. Sums over positions are of rotated values; H v is
// turned back once, in the result.
//
// Byte j of a token has number j in its low half and number j + E / 2 in its high one; the bytes j of
// four tokens lie side by side.
#pragma once
#include "pairs.h"

namespace {

constexpr int kMagnitudes = 8;
constexpr float kMagnitude[kMagnitudes] = {6, 18, 31, 44, 58, 75, 96, 127};
constexpr float kDeviation = 46.5f;

// The code is the place in this ascending row.
alignas(16) constexpr int8_t kLevels[16] = {-127, -96, -75, -58, -44, -31, -18, -6,
                                            6,    18,  31,  44,  58,  75,  96,  127};

HR_INLINE int64_t turned_at_once(int64_t size) { return size & -size; }

// x [E] times H, a matrix of ones and minus ones, in blocks.
HR_INLINE void hadamard(float* x, int64_t size) {
  const int64_t block = turned_at_once(size);
  for (int64_t half = 1; half < block; half *= 2)
    for (int64_t at = 0; at < size; at += 2 * half)
      for (int64_t i = at; i < at + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
}

// Codes of a head v [E] to `codes` [E / 2]; what a level counts, once it is turned back, in bf16.
// `room`: [E].
HR_INLINE uint16_t quantise_values(const float* v, int64_t size, uint8_t* codes, float* room) {
  memcpy(room, v, static_cast<size_t>(size) * 4);
  hadamard(room, size);
  float squares = 0;
  for (int64_t e = 0; e < size; ++e) squares = __builtin_fmaf(room[e], room[e], squares);
  const float unit = __builtin_sqrtf(squares / static_cast<float>(size)) / kDeviation;
  float limits[kMagnitudes - 1];
  for (int i = 0; i < kMagnitudes - 1; ++i)
    limits[i] = unit * (kMagnitude[i] + kMagnitude[i + 1]) / 2;
  float along = 0, length = 0;  // Σ y · level, Σ level²: the scale that comes nearest
  for (int64_t e = 0; e < size; ++e) {
    const float y = room[e], far = y < 0 ? -y : y;
    int place = 0;
    for (float limit : limits) place += far > limit;
    const float level = y < 0 ? -kMagnitude[place] : kMagnitude[place];
    const int code = y < 0 ? 7 - place : 8 + place;
    along = __builtin_fmaf(y, level, along);
    length += level * level;
    uint8_t& byte = codes[e < size / 2 ? e : e - size / 2];
    byte = static_cast<uint8_t>(e < size / 2 ? code : byte | code << 4);
  }
  return bf16_of(along / (length * static_cast<float>(turned_at_once(size))));
}

// Cells of V of sixteen columns in the low halves of 64 bytes, and in their high ones.
HR_INLINE C levels_below(const uint8_t* bytes) {
  return c_find(reinterpret_cast<const uint8_t*>(kLevels), c_and(c_load(bytes), c_set(15)));
}
HR_INLINE C levels_above(const uint8_t* bytes) {
  const C upper = c_shift<-4>(c_load(bytes));
  return c_find(reinterpret_cast<const uint8_t*>(kLevels), c_and(upper, c_set(15)));
}

// Bytes [E / 2][4] of four tokens to cells of V, [E][4].
HR_INLINE void look_up(const uint8_t* bytes, int64_t size, uint8_t* to) {
  const auto* levels = reinterpret_cast<const uint8_t*>(kLevels);
  const int64_t half = size / 2;
  if (half < 16) {
    for (int64_t i = 0; i < 4 * half; ++i) {
      to[i] = levels[bytes[i] & 15];
      to[4 * half + i] = levels[bytes[i] >> 4];
    }
    return;
  }
  for (int64_t e = 0; e < half; e += 16) {
    if (e + 16 > half) e = half - 16;  // some twice
    const C first = levels_below(bytes + 4 * e), second = levels_above(bytes + 4 * e);
    memcpy(to + 4 * e, &first, 64);
    memcpy(to + 4 * (half + e), &second, 64);
  }
}

}  // namespace

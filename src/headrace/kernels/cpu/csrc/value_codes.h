// Values of a KV cache in four bits: a head rotated, and each number the nearest of sixteen levels.
//
// What a few large numbers would take from the rest a rotation spreads over all: y = H v, with H the
// Hadamard matrix of as many numbers as the largest power of two that divides E (QuaRot, Ashkboos et
// al. 2024). What comes of it is close to normally distributed, so the levels are those of Lloyd and
// Max for the normal distribution, in 1/64 of its deviation: whole numbers of eight bits, which bf16
// holds exactly. Sums over positions are of rotated values; H v is turned back once, in the result.
//
// Byte j of a token has number j in its low half and number j + E / 2 in its high one.
#pragma once
#include "pairs.h"

namespace {

constexpr int kMagnitudes = 8;
constexpr float kMagnitude[kMagnitudes] = {8, 25, 42, 60, 80, 104, 132, 175};

// The code is the place in the ascending row −175 … 175.
HR_INLINE uint16_t level_of(int code) {
  return bf16_of(code < 8 ? -kMagnitude[7 - code] : kMagnitude[code - 8]);
}

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
  const float unit = __builtin_sqrtf(squares / static_cast<float>(size)) / 64.0f;
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

// Codes a and b of two tokens, side by side as the products read them: to [E][2].
HR_INLINE void widen_values(uint16_t* to, const uint8_t* a, const uint8_t* b, int64_t size) {
  const int64_t half = size / 2;
  int64_t e = 0;
#if HR_LEVEL >= 5
  alignas(64) static constexpr uint16_t kLevels[32] = {
      0xc32f, 0xc304, 0xc2d0, 0xc2a0, 0xc270, 0xc228, 0xc1c8, 0xc100,  // −175 … −8
      0x4100, 0x41c8, 0x4228, 0x4270, 0x42a0, 0x42d0, 0x4304, 0x432f,
      0xc32f, 0xc304, 0xc2d0, 0xc2a0, 0xc270, 0xc228, 0xc1c8, 0xc100,  // whatever bit 4 says
      0x4100, 0x41c8, 0x4228, 0x4270, 0x42a0, 0x42d0, 0x4304, 0x432f};
  const __m512i levels = _mm512_load_si512(kLevels);
  const auto words = [](const uint8_t* codes) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  };
  for (; e + 16 <= half; e += 16) {
    const __m512i both = _mm512_or_si512(words(a + e), _mm512_slli_epi32(words(b + e), 16));
    _mm512_storeu_si512(to + 2 * e, _mm512_permutexvar_epi16(both, levels));
    _mm512_storeu_si512(to + 2 * (half + e),
                        _mm512_permutexvar_epi16(_mm512_srli_epi16(both, 4), levels));
  }
#endif
  for (; e < half; ++e) {
    to[2 * e] = level_of(a[e] & 15);
    to[2 * e + 1] = level_of(b[e] & 15);
    to[2 * (half + e)] = level_of(a[e] >> 4);
    to[2 * (half + e) + 1] = level_of(b[e] >> 4);
  }
}

}  // namespace

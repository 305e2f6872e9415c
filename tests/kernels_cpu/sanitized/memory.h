// Memory for the sanitizers: blocks of exactly the right size, matrices with poisoned gaps.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "records.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#define HR_POISON(at, bytes) __asan_poison_memory_region(at, bytes)
#else
#define HR_POISON(at, bytes) (void)(at), (void)(bytes)
#endif

#define CHECK(condition)                                         \
  do {                                                           \
    if (!(condition)) {                                          \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                   \
    }                                                            \
  } while (0)

// Memory of exactly `count` values: a read past its end is a finding.
template <class T>
struct Block {
  T* data;
  size_t bytes;
  explicit Block(int64_t count) : bytes(static_cast<size_t>(count) * sizeof(T)) {
    void* at = nullptr;
    CHECK(posix_memalign(&at, 64, bytes ? bytes : 1) == 0);
    data = static_cast<T*>(at);
    memset(at, 0, bytes);
  }
  ~Block() { free(data); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
};

inline uint64_t g_state = 88172645463325252ull;  // Marsaglia's xorshift64
inline uint64_t random64() {
  g_state ^= g_state << 13;
  g_state ^= g_state >> 7;
  return g_state ^= g_state << 17;
}
inline float random_float() { return static_cast<float>(random64() >> 40) * 0x1p-23f - 1.0f; }

// A number in first … last.
inline int any(int first, int last) {
  return first + static_cast<int>(random64() % static_cast<uint64_t>(last - first + 1));
}

// Mostly ordinary; one in two hundred is none, infinite, a denormal, or as large as they get.
inline float any_float() {
  const float odd[] = {__builtin_nanf(""), __builtin_inff(), -__builtin_inff(), 1e-41f,
                       -1e-41f, 3e38f, -3e38f, 0.0f};
  return any(0, 199) ? random_float() * 4 : odd[any(0, 7)];
}

// Set where the results of two machines are compared: sign and payload of a NaN are the machine's
// own, x86 sets the sign of those that it makes and Arm does not.
inline bool g_one_nan = false;

// All NaNs are one as long as it lives.
struct OneNan {
  const bool before = g_one_nan;
  OneNan() { g_one_nan = true; }
  ~OneNan() { g_one_nan = before; }
};

// Makes all NaNs of `count` numbers one, whose infinity is `infinity` without its sign.
template <class T>
void one_nan(void* at, size_t count, T infinity) {
  constexpr T kSign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
  if (!g_one_nan) return;
  for (size_t i = 0; i < count; ++i) {
    auto* to = static_cast<uint8_t*>(at) + i * sizeof(T);
    T bits;
    memcpy(&bits, to, sizeof(T));
    bits = static_cast<T>(bits & ~kSign);
    if (bits <= infinity) continue;
    bits = static_cast<T>(infinity + 1);
    memcpy(to, &bits, sizeof(T));
  }
}
inline void one_nan(float* at, size_t count) { one_nan<uint32_t>(at, count, 0x7f800000); }

// [rows, width] whose rows lie `stride` apart. What lies between two rows may not be touched: the
// address sanitizer refuses it, as it does what lies behind the last row.
struct Grid {
  int rows, width;
  int64_t stride;
  Block<float> block;
  Grid(int rows_, int width_)
      : rows(rows_), width(width_), stride(width_ + (any(0, 2) ? 2 * any(1, 20) : 0)),
        block(rows_ ? (rows_ - 1) * stride + width_ : 0) {
    for (int r = 0; r + 1 < rows; ++r)
      HR_POISON(at(r) + width, static_cast<size_t>(stride - width) * 4);
  }
  float* at(int row) { return block.data + row * stride; }
  void fill(bool odd) {
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < width; ++i) at(r)[i] = odd ? any_float() : random_float();
  }
  // Its values, for comparison and to begin anew.
  std::vector<uint8_t> bytes() {
    const size_t row = static_cast<size_t>(width) * 4;
    std::vector<uint8_t> all(row * static_cast<size_t>(rows));
    for (int r = 0; r < rows; ++r) memcpy(all.data() + static_cast<size_t>(r) * row, at(r), row);
    one_nan<uint32_t>(all.data(), all.size() / 4, 0x7f800000);
    return all;
  }
  void put(const std::vector<uint8_t>& all) {
    const size_t row = static_cast<size_t>(width) * 4;
    for (int r = 0; r < rows; ++r) memcpy(at(r), all.data() + static_cast<size_t>(r) * row, row);
  }
};

// Rows of `width` values as codes, blocks of six rows `units` and sometimes more apart.
struct Codes {
  int64_t stride;
  Block<HrSix> six;
  HrQuantised q;
  Codes(int rows, int width, int more = 0)
      : stride(width / 32 + more),
        six(rows ? ((rows + HR_SIX - 1) / HR_SIX - 1) * stride + width / 32 : 0),
        q{six.data, stride} {}
  std::vector<uint8_t> bytes() {
    for (size_t i = 0; i < six.bytes / sizeof(HrSix); ++i)
      for (HrLane& lane : six.data[i].lanes) one_nan(&lane.unit.scale, 1), one_nan(&lane.unit.sum, 1);
    const auto* at = reinterpret_cast<const uint8_t*>(six.data);
    return std::vector<uint8_t>(at, at + six.bytes);
  }
};

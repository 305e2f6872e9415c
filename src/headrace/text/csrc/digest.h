// A digest that finds damage, of bytes that come in pieces: 128 bits, eight chains of which each
// takes every eighth word of 64 bits. A step of a chain is a bijection of the word and of what was
// there, so that one changed word always changes the end; it is no defence against who means it.

#pragma once

#include <cstdint>
#include <cstring>

namespace headrace {

// Zeros are its begin. Python keeps one as bytes: `worker/block_line.py` has its size.
struct Digest {
  static constexpr int kLanes = 8;
  static constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;

  uint64_t lanes[kLanes];
  uint64_t size;
  unsigned char rest[8 * kLanes];

  static uint64_t step(uint64_t lane, uint64_t word) {
    lane = (lane ^ word) * kOdd;
    return lane << 29 | lane >> 35;
  }

  void take(const unsigned char* data, uint64_t count) {
    const uint64_t held = size % sizeof rest;
    size += count;
    if (held) {
      const uint64_t more = count < sizeof rest - held ? count : sizeof rest - held;
      std::memcpy(rest + held, data, more);
      if (held + more < sizeof rest) return;
      stripes(rest, 1);
      data += more;
      count -= more;
    }
    stripes(data, count / sizeof rest);
    if (count % sizeof rest)
      std::memcpy(rest, data + count - count % sizeof rest, count % sizeof rest);
  }

  void end(uint64_t out[2]) {
    const uint64_t whole = size;
    static const unsigned char zeros[sizeof rest] = {};
    if (size % sizeof rest) take(zeros, sizeof rest - size % sizeof rest);
    out[0] = whole;
    out[1] = ~whole;
    for (int round = 0; round < 2; ++round)
      for (int i = 0; i < kLanes; ++i) {
        out[0] = step(out[0], lanes[i]);
        out[1] = step(out[1], lanes[kLanes - 1 - i] ^ out[0]);
      }
  }

 private:
  void stripes(const unsigned char* data, uint64_t count) {
    uint64_t kept[kLanes], words[kLanes];
    std::memcpy(kept, lanes, sizeof kept);
    for (; count; --count, data += sizeof words) {
      std::memcpy(words, data, sizeof words);
      for (int i = 0; i < kLanes; ++i) kept[i] = step(kept[i], words[i]);
    }
    std::memcpy(lanes, kept, sizeof kept);
  }
};

}  // namespace headrace

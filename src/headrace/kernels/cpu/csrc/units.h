// Reading one unit (16 outputs × 32 of K) of each format: codes by step, scales by output.
#pragma once
#include "layout.h"
#include "simd.h"

namespace {

// The eight steps, unrolled with the step as a constant (shifts want immediates); and by pairs that
// are decoded from the same vectors. Sums are of integers: any order gives the same.
#define HR_STEPS8(BODY) \
  do {                  \
    BODY(0) BODY(1) BODY(2) BODY(3) BODY(4) BODY(5) BODY(6) BODY(7) \
  } while (0)
#define HR_PAIRS8(BODY) \
  do {                  \
    BODY(0) BODY(4) BODY(1) BODY(5) BODY(2) BODY(6) BODY(3) BODY(7) \
  } while (0)

enum Mode { kPlain, kMin, kSub };
// kPlain: w = d · (code − zero). kMin: w = d · code + m. kSub: two scales of 16 inside the unit.

// A code's zero is subtracted by what its sum begins from, −zero · Σx. It is kept with the
// activations for the zeros 16, 32 and 128: a shift for every row would cost more than the bytes.

template <int S>
HR_INLINE C nibble(const uint8_t* q) {  // the low four bits right, the high four undefined
  C v = c_load(q + 64 * (S % 4));
  return S < 4 ? v : c_shift<-4>(v);
}

// The low four bits of one and those above of another, up to `all`. Beside many rows in three plain
// operations, which find room on four ports: on Zen 4 a vpternlog has a third operand to read and
// holds up a vpdpbusd. With few rows (`kFew`) the number of operations is what counts.
template <bool kFew, int kAll>
HR_INLINE C joined(C low, C high) {
  if constexpr (kFew) return c_and(c_select(c_set(15), low, high), c_set(kAll));
  return c_or(c_and(low, c_set(15)), c_and(high, c_set(kAll - 15)));
}

struct Q4_0 {
  static constexpr hr::Format format = hr::kQ4_0;
  static constexpr Mode mode = kPlain;
  static constexpr bool eight = false;
  static constexpr int zero = 8;  // the code that means zero
  template <int S, bool kFew>
  HR_INLINE C code(const uint8_t* q) {
    return c_and(nibble<S>(q), c_set(15));
  }
  HR_INLINE F scale(const uint8_t* block, const uint8_t*) {
    return f_half(reinterpret_cast<const uint16_t*>(block));
  }
};

template <int S, bool kFew>
HR_INLINE C five(const uint8_t* q) {
  C plane = c_shift<4 - S>(c_load(q + 256));
  return joined<kFew, 31>(nibble<S>(q), plane);
}

struct Q5_0 : Q4_0 {
  static constexpr hr::Format format = hr::kQ5_0;
  static constexpr int zero = 16;
  template <int S, bool kFew>
  HR_INLINE C code(const uint8_t* q) {
    return five<S, kFew>(q);
  }
};

struct Q4_1 : Q4_0 {
  static constexpr hr::Format format = hr::kQ4_1;
  static constexpr Mode mode = kMin;
  HR_INLINE F min(const uint8_t* block, const uint8_t*) {
    return f_half(reinterpret_cast<const uint16_t*>(block + 32));
  }
};

struct Q5_1 : Q4_1 {
  static constexpr hr::Format format = hr::kQ5_1;
  template <int S, bool kFew>
  HR_INLINE C code(const uint8_t* q) {
    return five<S, kFew>(q);
  }
};

struct Q8_0 : Q4_0 {
  static constexpr hr::Format format = hr::kQ8_0;
  static constexpr bool eight = true;
  static constexpr int zero = 128;
  template <int S, bool kFew>
  HR_INLINE C code(const uint8_t* q) {
    return c_load(q + 64 * S);
  }
};

struct MXFP4 : Q4_0 {
  static constexpr hr::Format format = hr::kMXFP4;
  static constexpr int zero = 16;
  template <int S, bool kFew>
  HR_INLINE C code(const uint8_t* q) {
    return c_find(hr::kMxfp4Codes, Q4_0::code<S, kFew>(q));
  }
  HR_INLINE F scale(const uint8_t* block, const uint8_t*) {
    return f_bits(i_shl<23>(i_max(i_sub(i_u8(block), i_set(1)), i_set(0))));
  }
};

struct IQ4_NL : Q8_0 {
  static constexpr hr::Format format = hr::kIQ4_NL;
  template <int S, bool kFew>
  HR_INLINE C code(const uint8_t* q) {
    return c_find(hr::kIq4Codes, Q4_0::code<S, kFew>(q));
  }
};

struct IQ4_XS : IQ4_NL {
  static constexpr hr::Format format = hr::kIQ4_XS;
  HR_INLINE F scale(const uint8_t* block, const uint8_t* unit) {
    return f_mul(f_from_i(i_s8(reinterpret_cast<const int8_t*>(unit))),
                 f_half(reinterpret_cast<const uint16_t*>(block)));
  }
};

struct NVFP4 : MXFP4 {
  static constexpr hr::Format format = hr::kNVFP4;
  static constexpr Mode mode = kSub;
  HR_INLINE F scale(const uint8_t* block, const uint8_t*) {
    return f_set(*reinterpret_cast<const float*>(block));
  }
  HR_INLINE F sixteenth(const uint8_t* scales) { return f_e4m3(scales); }
};

struct INT4 : Q4_0 {
  static constexpr hr::Format format = hr::kINT4;
  static constexpr Mode mode = kMin;
  HR_INLINE F scale(const uint8_t* block, const uint8_t*) {
    return f_load(reinterpret_cast<const float*>(block));
  }
  HR_INLINE F min(const uint8_t* block, const uint8_t* unit) {
    return f_mul(f_from_i(i_sub(i_set(0), i_u8(block + 64))), scale(block, unit));
  }
};

struct INT8 : Q8_0 {
  static constexpr hr::Format format = hr::kINT8;
  HR_INLINE F scale(const uint8_t* block, const uint8_t*) {
    return f_load(reinterpret_cast<const float*>(block));
  }
};

// Q8_0 in two planes: `low` points to the unit's threes. See layout.h.
struct Q8_0_PLANES : Q8_0 {
  static constexpr hr::Format format = hr::kQ8_0_PLANES;
  template <int K, bool kFew>
  HR_INLINE C rest(const uint8_t* q, const uint8_t* low) {  // r_K: bits 3 to 0 of steps K, K + 4
    C bits = c_shift<K>(c_load(q + 256));
    if constexpr (K < 3) {
      C three = c_load(low + 64 * K);
      if constexpr (kFew) return c_select(c_set(0x77), three, bits);
      return c_or(c_and(three, c_set(0x77)), c_and(bits, c_set(0x88)));
    }
    C a = c_shift<-3>(c_load(low)), b = c_shift<-2>(c_load(low + 64));
    C c = c_shift<-1>(c_load(low + 128));
    if constexpr (kFew)
      return c_select(c_set(0x77), c_select(c_set(0x33), c_select(c_set(0x11), a, b), c), bits);
    return c_or(c_or(c_and(a, c_set(0x11)), c_and(b, c_set(0x22))),
                c_or(c_and(c, c_set(0x44)), c_and(bits, c_set(0x88))));
  }
  template <int S, bool kFew>
  HR_INLINE C code(const uint8_t* q, const uint8_t* low) {
    C nibbles = c_load(q + 64 * (S % 4)), four = rest<S % 4, kFew>(q, low);
    if constexpr (S < 4) nibbles = c_shift<4>(nibbles);
    else four = c_shift<-4>(four);
    if constexpr (kFew) return c_select(c_set(0xf0), nibbles, four);
    return c_or(c_and(nibbles, c_set(0xf0)), c_and(four, c_set(0x0f)));
  }
  template <int S>
  HR_INLINE C high(const uint8_t* q) {  // the five high bits, as a number up to 31
    C nibbles = c_load(q + 64 * (S % 4));
    C bits = c_shift<(S < 4 ? S - 3 : S - 11)>(c_load(q + 256));
    return c_and(c_select(c_set(30), c_shift<(S < 4 ? 1 : -3)>(nibbles), bits), c_set(31));
  }
};

// Step S of any kind; what is in one plane has no `low`.
template <class Q, int S, bool kFew>
HR_INLINE C code_of(const uint8_t* q, const uint8_t* low) {
  if constexpr (Q::format.low_bytes != 0) return Q::template code<S, kFew>(q, low);
  else return Q::template code<S, kFew>(q);
}

struct Q4_K : Q4_0 {
  static constexpr hr::Format format = hr::kQ4_K;
  static constexpr Mode mode = kMin;
  HR_INLINE F scale(const uint8_t* block, const uint8_t* unit) {
    return f_mul(f_from_i(i_u8(unit)), f_half(reinterpret_cast<const uint16_t*>(block)));
  }
  HR_INLINE F min(const uint8_t* block, const uint8_t* unit) {
    F dmin = f_sub(f_zero(), f_half(reinterpret_cast<const uint16_t*>(block + 32)));
    return f_mul(f_from_i(i_u8(unit + 16)), dmin);
  }
};

struct Q5_K : Q4_K {
  static constexpr hr::Format format = hr::kQ5_K;
  template <int S, bool kFew>
  HR_INLINE C code(const uint8_t* q) {
    return five<S, kFew>(q);
  }
};

struct Q6_K : Q4_0 {
  static constexpr hr::Format format = hr::kQ6_K;
  static constexpr Mode mode = kSub;
  static constexpr int zero = 32;
  template <int S, bool kFew>
  HR_INLINE C code(const uint8_t* q) {
    C pairs = c_shift<4 - 2 * (S % 4)>(c_load(q + 256 + 64 * (S / 4)));
    return joined<kFew, 63>(nibble<S>(q), pairs);
  }
  HR_INLINE F sixteenth(const uint8_t* scales) {
    return f_from_i(i_s8(reinterpret_cast<const int8_t*>(scales)));
  }
};

}  // namespace

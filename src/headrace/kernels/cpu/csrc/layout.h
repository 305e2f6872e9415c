// Panels: how quantised weights lie in memory for the products.
//
// A panel is 16 outputs by all of K. Inside, K goes in *units* of 32, and a unit in 8 *steps* of
// 4: step s holds 16 outputs × 4 values, so that one 64-byte vector of codes meets one dword of
// activations (broadcast) in one vpdpbusd, and the sixteen int32 lanes are sixteen outputs. No
// lane is ever summed with another, and the order over K is the same for one row and for many.
//
//   nibbles   4 × 64 bytes   byte vector j: low nibbles are step j, high nibbles step j + 4
//   bits      1 × 64 bytes   bit s of a byte: fifth bit of step s
//   pairs     2 × 64 bytes   vector s / 4, bits 2(s % 4)…: bits five and six of step s
//   bytes     8 × 64 bytes   eight-bit codes, stored with +128
//
// Block formats keep their own scales (no rounding anywhere), transposed to 16 outputs:
//
//   kind   K span   header             unit                                       bits/weight
//   Q4_0       32   d                  nibbles                                           4.5
//   Q4_1       32   d, m               nibbles                                           5.0
//   Q5_0       32   d                  nibbles, bits                                     5.5
//   Q5_1       32   d, m               nibbles, bits                                     6.0
//   Q8_0       32   d                  bytes                                             8.5
//   Q4_K      256   d, dmin            16 scales, 16 mins (bytes), nibbles             4.625
//   Q5_K      256   d, dmin            16 scales, 16 mins (bytes), nibbles, bits       5.625
//   Q6_K      256   d                  2 × 16 scales (bytes), nibbles, pairs          6.5625
//   MXFP4      32   e (bytes)          nibbles                                          4.25
//   IQ4_NL     32   d                  nibbles                                           4.5
//   IQ4_XS    256   d                  16 scales (signed bytes), nibbles              4.3125
//   Q8_0_PLANES 32  d                  nibbles, bits; elsewhere: threes                  8.5
//   INT4      128   d (fp32), z (byte) nibbles                                        4.3125
//   INT8      128   d (fp32)           bytes                                            8.25
//   NVFP4      64   d (fp32, four times) 2 × 16 scales (bytes), nibbles                4.625
//
// Q8_0_PLANES is Q8_0 for a head (bound.h): the five high bits of every code in one plane, panel
// after panel with their scales, and behind it all the three low bits of every code in another.
// Bits 7 to 4 of a code are its nibble; the rest is ordered so that bits 3 to 0 of steps k and
// k + 4 come out as one vector of nibbles r_k for few operations:
//
//   bits      1 × 64 bytes   (bits << k) & 0x88: bit 3 of steps k (low nibble) and k + 4 (high)
//   threes    3 × 64 bytes   vector k < 3: & 0x77 bits 2 to 0 of steps k and k + 4 in r_k's place;
//                            its bits 3 and 7 are bit k of steps 3 and 7
//
// MXFP4 (OCP Microscaling Formats 1.0) is a number of four bits with a sign, two bits of exponent and
// one of fraction, times 2^(e − 127). Twice a number is whole, from −12 to 12: codes are looked up as
// these plus sixteen, and scales are halved. (Scales below 2^-126 count as none.)
//
// IQ4_NL and IQ4_XS look their codes up, too: sixteen whole numbers that lie closer around zero.
//
// INT4 and INT8 are what checkpoints in safetensors have and GGUF has not: scales beyond half
// precision, and w = d · (code − z) with a zero z of each group's own.
//
// NVFP4 is the same numbers of four bits with a scale in E4M3 for each 16. One d of a whole panel is
// the half of what all scales are multiplied with, times 256 (see E4M3).
//
// E4M3 is fp8 against activations in floats (chain.h): [k][16] bytes, and behind them for each 128 of
// K sixteen fp32 scales, times 256. A byte without its sign, shifted by seven, is the half of the
// same number divided by 256: exponents of five bits have another bias than those of four.
//
// The files hold the same at 4.5 and 5.5 for Q4_K and Q5_K: six-bit scales are widened to bytes.
#pragma once
#include <stdint.h>

#include "records.h"

#define HR_PANEL 16
#define HR_UNIT_K 32
// Never a shared copy: a level's copy would hold instructions that others must not run.
#define HR_ALWAYS inline __attribute__((always_inline))

namespace hr {

struct Format {
  int kind;
  int span;        // K of one block
  int header;      // bytes in front of a block's units
  int unit_extra;  // bytes in front of a unit's codes
  int code_bytes;  // of a unit
  int file_bytes;  // of one block of one output in a GGUF file
  int low_bytes;   // of a unit in the plane of low bits; 0: there is none
  HR_ALWAYS constexpr int unit_bytes() const { return unit_extra + code_bytes; }
  HR_ALWAYS constexpr int units() const { return span / HR_UNIT_K; }
  HR_ALWAYS constexpr int block_bytes() const { return header + units() * unit_bytes(); }
};

constexpr Format kQ4_0{HR_Q4_0, 32, 32, 0, 256, 18, 0};
constexpr Format kQ4_1{HR_Q4_1, 32, 64, 0, 256, 20, 0};
constexpr Format kQ5_0{HR_Q5_0, 32, 32, 0, 320, 22, 0};
constexpr Format kQ5_1{HR_Q5_1, 32, 64, 0, 320, 24, 0};
constexpr Format kQ8_0{HR_Q8_0, 32, 32, 0, 512, 34, 0};
constexpr Format kQ4_K{HR_Q4_K, 256, 64, 32, 256, 144, 0};
constexpr Format kQ5_K{HR_Q5_K, 256, 64, 32, 320, 176, 0};
constexpr Format kQ6_K{HR_Q6_K, 256, 32, 32, 384, 210, 0};
constexpr Format kMXFP4{HR_MXFP4, 32, 16, 0, 256, 17, 0};
constexpr uint8_t kMxfp4Codes[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};
constexpr Format kIQ4_NL{HR_IQ4_NL, 32, 32, 0, 256, 18, 0};
constexpr Format kIQ4_XS{HR_IQ4_XS, 256, 32, 16, 256, 136, 0};
constexpr uint8_t kIq4Codes[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};  // with +128
constexpr Format kQ8_0_PLANES{HR_Q8_0_PLANES, 32, 32, 0, 320, 34, 192};
constexpr Format kINT4{HR_INT4, 128, 80, 0, 256, 0, 0};
constexpr Format kINT8{HR_INT8, 128, 64, 0, 512, 0, 0};
constexpr Format kNVFP4{HR_NVFP4, 64, 16, 32, 256, 0, 0};

static inline const Format* format_of(int kind) {
  switch (kind) {
    case HR_Q4_0: return &kQ4_0;
    case HR_Q4_1: return &kQ4_1;
    case HR_Q5_0: return &kQ5_0;
    case HR_Q5_1: return &kQ5_1;
    case HR_Q8_0: return &kQ8_0;
    case HR_Q4_K: return &kQ4_K;
    case HR_Q5_K: return &kQ5_K;
    case HR_Q6_K: return &kQ6_K;
    case HR_Q8_0_PLANES: return &kQ8_0_PLANES;
    case HR_MXFP4: return &kMXFP4;
    case HR_IQ4_NL: return &kIQ4_NL;
    case HR_IQ4_XS: return &kIQ4_XS;
    case HR_INT4: return &kINT4;
    case HR_INT8: return &kINT8;
    case HR_NVFP4: return &kNVFP4;
    default: return nullptr;
  }
}

static inline int dense_bytes(int kind) { return kind == HR_F32 ? 4 : kind == HR_E4M3 ? 1 : 2; }

constexpr int64_t kScaled = 128;  // K of an E4M3 weight that shares scales

// Bytes of the scales behind a panel.
static inline int64_t scale_bytes(int kind, int64_t in) {
  return kind == HR_E4M3 ? (in + kScaled - 1) / kScaled * HR_PANEL * 4 : 0;
}

// Bytes of a panel in all of its planes.
static inline int64_t panel_bytes(int kind, int64_t in) {
  const Format* f = format_of(kind);
  if (f) return in / f->span * (f->block_bytes() + f->units() * f->low_bytes);
  return in * HR_PANEL * dense_bytes(kind) + scale_bytes(kind, in);
}

static inline int64_t panel_count(int64_t out) { return (out + HR_PANEL - 1) / HR_PANEL; }

// Where the low bits of a panel lie, from the weight's begin.
HR_ALWAYS int64_t low_at(const Format& f, int64_t out, int64_t in, int64_t panel) {
  const int64_t blocks = in / f.span;
  return blocks * (panel_count(out) * f.block_bytes() + panel * f.units() * f.low_bytes);
}

}  // namespace hr

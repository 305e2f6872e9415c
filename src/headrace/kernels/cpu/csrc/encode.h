// Dense weights into fewer bits: see encode.cpp.
#pragma once
#include <stdint.h>

namespace hr {

constexpr int kPiece = 256;  // numbers that are encoded at a time

// Pieces [first, last) of `count` numbers of `type` (HR_F32, HR_F16, HR_BF16), whole blocks of
// `kind`, as GGUF has them. False: a number is not finite, or too large for a half's scale.
bool encode_blocks(int kind, int type, const void* numbers, int64_t count, int64_t first,
                   int64_t last, uint8_t* out);

// Scales of groups [first, last) of `size` numbers (16, 32, 64, 128), whose codes are to be
// -half … half - 1. False: as above.
bool symmetric_scales(const float* numbers, int size, int half, int64_t first, int64_t last,
                      float* scales);

}  // namespace hr

// Repacking and row expansion: see pack.cpp.
#pragma once
#include <stdint.h>

namespace hr {

// Panels [first, last) of a matrix [out, in] of `kind`; `target` is the start of the weight.
void pack_panels(int kind, const uint8_t* rows, int64_t row_bytes, int64_t out, int64_t in,
                 int64_t first, int64_t last, uint8_t* target);

// One row of a matrix in the file's form as floats, times `scale`.
void expand_row(int kind, const uint8_t* row, int64_t size, float scale, float* y);

}  // namespace hr

// Repacking and row expansion: see pack.cpp.
#pragma once
#include <stdint.h>

namespace hr {

// Panels [first, last) of a matrix [out, in] of `kind`; `target` is the start of the weight.
void pack_panels(int kind, const uint8_t* rows, int64_t row_bytes, int64_t out, int64_t in,
                 int64_t first, int64_t last, uint8_t* target);

// A matrix of codes, one a byte, [out, in], as checkpoints in safetensors have it.
struct CodedRows {
  const uint8_t* codes;  // Q4_0, INT4, NVFP4: 0 … 15; Q5_0: 0 … 31; Q8_0, INT8: with +128; E4M3: its bytes
  const void* scales;    // [out, in / group]: fp16 of Q4_0, Q5_0 and Q8_0, fp32 of the others; one d of NVFP4
  const uint8_t* zeros;  // likewise: INT4's z, NVFP4's scales in E4M3; null for other kinds
  int64_t group;
};

// The same panels as of a GGUF's blocks. E4M3's groups are of 128, the last one of what is left.
void pack_coded(int kind, const CodedRows& rows, int64_t out, int64_t in, int64_t first,
                int64_t last, uint8_t* target);

// One row of a matrix in the file's form as floats, times `scale`.
void expand_row(int kind, const uint8_t* row, int64_t size, float scale, float* y);

}  // namespace hr

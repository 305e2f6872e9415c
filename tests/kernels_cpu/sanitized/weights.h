// Weights in every kind: random bytes as they lie in a file, and packed.
#pragma once
#include "memory.h"

extern "C" {
int64_t hr_packed_bytes(int32_t kind, int64_t out, int64_t in);
void hr_pack(void* team, int32_t kind, const uint8_t* rows, int64_t row_bytes, int64_t out,
             int64_t in, uint8_t* target);
}

struct Kind {
  int kind, span, bytes;
  int halves[2];  // where its fp16 numbers are, −1: none
};
constexpr Kind kKinds[] = {
    {HR_Q4_0, 32, 18, {0, -1}},   {HR_Q4_1, 32, 20, {0, 2}},   {HR_Q5_0, 32, 22, {0, -1}},
    {HR_Q5_1, 32, 24, {0, 2}},    {HR_Q8_0, 32, 34, {0, -1}},  {HR_Q4_K, 256, 144, {0, 2}},
    {HR_Q5_K, 256, 176, {0, 2}},  {HR_Q6_K, 256, 210, {208, -1}}, {HR_F32, 1, 4, {-1, -1}},
    {HR_F16, 1, 2, {0, -1}},      {HR_BF16, 1, 2, {0, -1}},  {HR_Q8_0_PLANES, 32, 34, {0, -1}}};
constexpr int kQuantised = 8;  // so many of them come in blocks
constexpr int kAll = 11;
constexpr int kPlanes = 11;    // behind them: of heads alone

// A matrix as in a file, of exactly its size.
struct File {
  int64_t row;
  Block<uint8_t> data;
  File(const Kind& k, int out, int in) : row(static_cast<int64_t>(in) / k.span * k.bytes),
                                         data(row * out) {
    for (int64_t i = 0; i < row * out; ++i) data.data[i] = static_cast<uint8_t>(random64());
    for (int64_t b = 0; b < row * out; b += k.bytes) {
      if (k.kind == HR_F32) {
        const float x = random_float();
        memcpy(data.data + b, &x, 4);
      }
      for (int at : k.halves)
        if (at >= 0) data.data[b + at + 1] = static_cast<uint8_t>(0x20 | (random64() & 0x83));
    }
  }
};

struct Weight {
  int kind, out, in;
  Block<uint8_t> panels;
  Weight(void* team, const Kind& k, int out_, int in_)
      : kind(k.kind), out(out_), in(in_), panels(hr_packed_bytes(k.kind, out_, in_)) {
    File file(k, out, in);
    hr_pack(team, kind, file.data.data, file.row, out, in, panels.data);
  }
  HrPart part(float* y, int64_t stride, const float* bias, bool accumulate) const {
    return {panels.data, bias, y, stride, kind, out, in, accumulate};
  }
};

// Weights in every kind: random bytes as they lie in a file, and packed.
#pragma once
#include "library.h"
#include "memory.h"

struct Kind {
  int kind, span, bytes;
  int halves[2];  // where its fp16 numbers are, −1: none
};
constexpr Kind kKinds[] = {
    {HR_INT4, 128, 0, {-1, -1}},  {HR_INT8, 128, 0, {-1, -1}}, {HR_NVFP4, 64, 0, {-1, -1}},
    {HR_Q4_0, 32, 18, {0, -1}},
    {HR_Q4_1, 32, 20, {0, 2}},    {HR_Q5_0, 32, 22, {0, -1}},  {HR_Q5_1, 32, 24, {0, 2}},
    {HR_Q8_0, 32, 34, {0, -1}},   {HR_Q4_K, 256, 144, {0, 2}}, {HR_Q5_K, 256, 176, {0, 2}},
    {HR_Q6_K, 256, 210, {208, -1}}, {HR_MXFP4, 32, 17, {-1, -1}}, {HR_F32, 1, 4, {-1, -1}},
    {HR_F16, 1, 2, {0, -1}},      {HR_BF16, 1, 2, {0, -1}},    {HR_E4M3, 1, 0, {-1, -1}},
    {HR_Q8_0_PLANES, 32, 34, {0, -1}}};
constexpr int kInFiles = 3;     // before them: in no GGUF, nor is the last of the dense
constexpr int kQuantised = 12;  // so many of them come in blocks
constexpr int kAll = 16;
constexpr int kPlanes = 16;     // behind them: of heads alone

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
      if (k.kind == HR_MXFP4) data.data[b] = static_cast<uint8_t>(0x70 | (random64() & 15));
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
    if (k.bytes) {
      File file(k, out, in);
      hr_pack(team, kind, file.data.data, file.row, out, in, panels.data);
    } else {
      pack_coded(team);
    }
  }
  // Codes by chance with a scale for 128 of a row, or for 16 of NVFP4, as in safetensors.
  void pack_coded(void* team) {
    const int64_t group = kind == HR_NVFP4 ? 16 : 128;
    const int64_t all = static_cast<int64_t>(out) * in, groups = out * ((in + group - 1) / group);
    Block<uint8_t> codes(all), zeros(groups);
    Block<float> scales(groups);
    const bool four = kind == HR_INT4 || kind == HR_NVFP4;
    const int most = four ? 15 : 255;
    for (int64_t i = 0; i < all; ++i) codes.data[i] = static_cast<uint8_t>(any(0, most));
    for (int64_t i = 0; i < groups; ++i) {
      scales.data[i] = random_float();
      zeros.data[i] = static_cast<uint8_t>(any(0, 15));
    }
    hr_pack_coded(team, kind, codes.data, scales.data, four ? zeros.data : nullptr, group, out, in,
                  panels.data);
  }
  HrPart part(float* y, int64_t stride, const float* bias, bool accumulate) const {
    return {panels.data, nullptr, bias, y, stride, kind, out, in, accumulate};
  }
};

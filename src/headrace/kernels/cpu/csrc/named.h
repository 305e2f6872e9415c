// Levels that serve by name only: dense products of bf16 in blocks of K by a kernel of their own,
// whose bits no other level has; all else as at level bf16.
#pragma once
#include "head.h"
#include "levels.h"

namespace {

constexpr int kBlockK = 32;  // of K, bf16: a cache line of a row

// Puts k and k + 1 of an output side by side: two vectors' places of a panel [k][16].
alignas(64) constexpr uint16_t kTurns[32] = {
    0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

HR_INLINE bool in_blocks(const HrPart& part) {
  return part.kind == HR_BF16 && part.in % kBlockK == 0;
}

// K of the parts that are products in blocks; zero: there are none.
HR_INLINE int64_t width_in_blocks(const HrLinear& op) {
  for (int32_t i = 0; i < op.count; ++i)
    if (op.dense && in_blocks(op.parts[i])) return op.parts[i].in;
  return 0;
}

// `Dense` is a kernel: linear(op, work), and room(K), the bytes of work space of each thread.
template <class Dense>
void run(const HrRecord& record, const hr::Work& work) {
  if (record.code == HR_OP_LINEAR) {
    const auto& op = hr::op_of<HR_OP_LINEAR>(record);
    if (width_in_blocks(op)) return Dense::linear(op, work);
  }
  if (record.code == HR_OP_BEST) {
    const auto& op = hr::op_of<HR_OP_BEST>(record);
    if (width_in_blocks(op.linear))
      return best_by(op, work, [&](const HrLinear& linear) { Dense::linear(linear, work); });
  }
  hr::bf16::kernels.run(record, work);
}

template <class Dense>
hr::Room scratch_of(const HrRecord& record, const HrStep& step, int threads) {
  hr::Room room = hr::bf16::kernels.scratch(record, step, threads);
  int64_t in = 0;
  if (record.code == HR_OP_LINEAR) in = width_in_blocks(hr::op_of<HR_OP_LINEAR>(record));
  if (record.code == HR_OP_BEST)
    in = width_in_blocks(hr::op_of<HR_OP_BEST>(record).linear);
  if (in && Dense::room(in) > room.each) room.each = Dense::room(in);
  return room;
}

// Both ceilings are asked of the vector units, as at the other levels.
double integer_peak(int64_t iterations) { return hr::bf16::kernels.integer_peak(iterations); }

uint64_t read_stream(const uint8_t* data, int64_t bytes) {
  return hr::bf16::kernels.read_stream(data, bytes);
}

// The level's table. Kernels are per translation unit (simd.h says why).
template <class Dense>
constexpr hr::Kernels named(const char* name) {
  return {name, run<Dense>, scratch_of<Dense>, integer_peak, read_stream};
}

}  // namespace

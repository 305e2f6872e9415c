// Latent attention beside attention itself: queries to latents, sums of latents to values.
//
// A head's product is small (DeepSeek: 512 x 128 numbers each way), and all heads of a layer are one
// record, so that its runs of panels are shared among the threads as those of one product are.
#pragma once
#include "records.h"
#include "products.h"

namespace {

void op_heads(const HrHeads& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.linear.rows);
  if (rows == 0) return;
  each_run(op.linear, rows, work, [&](const HrPart& part, int64_t first, int64_t last) {
    const int64_t column = op.first + (&part - op.linear.parts) * op.step;
    HrLinear own = op.linear;
    if (own.x.six) own.x.six += column / 32;
    if (own.dense) own.dense += column;
    part_panels(own, part, rows, first, last);
  });
}

void op_columns(const HrColumns& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.rows(op.rows), &first, &last);
  for (int64_t row = first; row < last; ++row)
    for (int64_t i = 0; i < op.times; ++i)
      memcpy(op.y + row * op.y_stride + i * op.y_step, op.x + row * op.x_stride + i * op.x_step,
             static_cast<size_t>(op.size) * 4);
}

}  // namespace

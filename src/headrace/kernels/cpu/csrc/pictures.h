// Parts of convolutional networks over pictures, whose rows are places line by line.
#pragma once
#include "rows.h"
#include "tails.h"

namespace {

// What a convolution multiplies, row by row of a strip of its result.
void op_around(const HrAround& op, const hr::Work& work) {
  const int64_t wide = int64_t{op.columns} * op.up - op.cut, high = int64_t{op.lines} * op.up - op.cut;
  const int64_t columns = (wide + op.stride - 1) / op.stride, lines = (high + op.stride - 1) / op.stride;
  int64_t from, to;
  work.share(work.step->t, &from, &to);
  for (int64_t row = from; row < to; ++row) {
    const int64_t place = op.first + row, line = place / columns % lines;
    const int64_t top = line * op.stride - op.side / 2, left = place % columns * op.stride - op.side / 2;
    const float* x = op.x + place / columns / lines * op.lines * op.columns * op.x_stride;
    float* y = op.y + row * op.y_stride;
    for (int64_t i = top; i < top + op.side; ++i)
      for (int64_t j = left; j < left + op.side; ++j, y += op.size) {
        const bool inside = i >= 0 && i < high && j >= 0 && j < wide;
        const size_t bytes = sizeof(float) * static_cast<size_t>(op.size);
        if (inside) memcpy(y, x + (i / op.up * op.columns + j / op.up) * op.x_stride, bytes);
        else memset(y, 0, bytes);
      }
  }
}

int64_t group_norm_scratch(const HrGroupNorm& op) { return 24 * int64_t{op.size} + 64; }

template <bool kSilu>
void group_norm_apply(const HrGroupNorm& op, int64_t rows, int64_t columns, const float* x, float* y,
                      const float* gains, const float* shifts) {
  for (int64_t row = 0; row < rows; ++row, x += op.x_stride, y += op.y_stride)
    for (int64_t i = 0; i < columns; i += 16) {
      const int64_t left = columns - i;
      F v = f_fma(f_tail(x + i, left), f_tail(gains + i, left), f_tail(shifts + i, left));
      if constexpr (kSilu) v = activate<HR_SILU>(v);
      f_store_tail(y + i, v, left);
    }
}

// A thread has whole groups. Sums of a column go over 64 rows in fp32, then in fp64: they depend on
// neither the threads nor the other pictures.
void op_group_norm(const HrGroupNorm& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.rows) / (work.step->b ? work.step->b : 1);
  const int64_t each = op.size / op.groups;
  int64_t from, to;
  work.share(op.groups, &from, &to);
  const int64_t first = from * each, columns = (to - from) * each;
  double* sums = reinterpret_cast<double*>(work.scratch);
  double* squares = sums + columns;
  float* gains = reinterpret_cast<float*>(squares + columns);
  float* shifts = gains + columns;
  for (int64_t b = 0; b < work.step->b && columns; ++b) {
    const float* x = op.x + b * rows * op.x_stride + first;
    memset(sums, 0, 2 * sizeof(double) * static_cast<size_t>(columns));
    for (int64_t row = 0; row < rows; row += 64) {
      const int64_t last = row + 64 < rows ? row + 64 : rows;
      for (int64_t i = 0; i < columns; i += 16) {
        const int64_t left = columns - i < 16 ? columns - i : 16;
        F sum = f_zero(), square = f_zero();
        for (int64_t r = row; r < last; ++r) {
          const F v = f_tail(x + r * op.x_stride + i, left);
          sum = f_add(sum, v);
          square = f_fma(v, v, square);
        }
        float lanes[2][16];
        f_store(lanes[0], sum);
        f_store(lanes[1], square);
        for (int64_t j = 0; j < left; ++j) {
          sums[i + j] += lanes[0][j];
          squares[i + j] += lanes[1][j];
        }
      }
    }
    for (int64_t group = 0; group < columns; group += each) {
      double sum = 0, square = 0;
      for (int64_t i = group; i < group + each; ++i) sum += sums[i], square += squares[i];
      const double count = static_cast<double>(rows * each), mean = sum / count;
      const double spread = square / count - mean * mean;
      const double by = 1.0 / __builtin_sqrt((spread > 0 ? spread : 0) + op.eps);
      for (int64_t i = group; i < group + each; ++i) {
        const double gain = by * op.gain[first + i];
        gains[i] = static_cast<float>(gain);
        shifts[i] = static_cast<float>(op.shift[first + i] - mean * gain);
      }
    }
    float* y = op.y + b * rows * op.y_stride + first;
    if (op.silu) group_norm_apply<true>(op, rows, columns, x, y, gains, shifts);
    else group_norm_apply<false>(op, rows, columns, x, y, gains, shifts);
  }
}

}  // namespace

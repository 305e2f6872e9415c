// The records of latent attention beside attention itself; `latent.h` has what they do.
#pragma once
#include "records.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {         // a product for each head: part i reads columns from first + i · step on
  HrLinear linear;
  int64_t first;         // multiples of 32 where a part reads codes
  int64_t step;
} HrHeads;

typedef struct {         // `times` runs of `size` columns from x to y
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  int64_t x_step;        // from one run to the next
  int64_t y_step;
  int32_t size;
  int32_t times;
  int32_t rows;
  int32_t unused;
} HrColumns;

#ifdef __cplusplus
}
#endif

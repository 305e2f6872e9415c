// The records of layers that keep a state; `recurrence.h` has what they do.
#pragma once
#include "records.h"

#ifdef __cplusplus
extern "C" {
#endif

// A row of HrStep.states: tokens in the entry's state, tokens of the step that are no drafts, then
// twice a checkpoint: behind how many tokens (0: none), into which block.
#define HR_STATE_COLUMNS 6

typedef struct {         // a causal convolution of each channel by itself
  const float* x;        // [N, C]; gated: [N, 3C], b, c and x side by side, and y = c · conv(b · x)
  int64_t x_stride;
  const float* taps;     // [taps, C]
  const float* bias;     // [C] or null
  float* y;              // [N, C]
  int64_t y_stride;
  float* inputs;         // [blocks, room, C]: the input of position p in row p % room
  int32_t channels;
  int32_t count;         // of taps
  int32_t room;
  int32_t gated;
  int32_t silu;          // y = silu(conv)
  int32_t group;
} HrConv;

typedef struct {         // the gated delta rule, or a selective state space: of each head a matrix
  const float* mixed;    // [N, ·]: q, k, v; or x, B, C
  int64_t mixed_stride;
  const float* z;        // [N, H · V]
  int64_t z_stride;
  const float* b;        // [N, H]; null: a state space
  int64_t b_stride;
  const float* a;        // [N, H]; dt
  int64_t a_stride;
  const float* decay;    // [H]
  const float* step;     // [H]
  const float* skip;     // [H]; null: the delta rule
  const float* gain;     // [V] of the delta rule's norm; a state space has its norm behind
  float* y;              // [N, H · V]
  int64_t y_stride;
  float* state;          // [blocks, H, K · V]: of a head runs of 32 columns, [K, 32] each
  float* tail;           // [blocks, drafts, H, K + V + 2]
  int32_t key_heads;
  int32_t heads;
  int32_t key_size;      // K, V: multiples of sixteen
  int32_t value_size;
  int32_t drafts;
  int32_t group;
  float eps;
  int32_t tiled;         // heads take key heads in turn; else each has a run of heads
} HrRecurrence;

typedef struct {         // y = x · act(gate)
  const float* x;
  int64_t x_stride;
  const float* gate;
  int64_t gate_stride;
  float* y;              // null: not wanted in fp32
  int64_t y_stride;
  HrQuantised q;
  int32_t size;
  int32_t activation;
  int32_t rows;
  int32_t unused;
} HrMultiply;

#ifdef __cplusplus
}
#endif

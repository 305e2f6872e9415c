// The records of a mixture of experts; `experts.h` has what they do.
#pragma once
#include "records.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HR_MAX_EXPERT_GROUPS 64

enum HrScores { HR_OVER_ALL = 0, HR_EACH_SIGMOID = 1, HR_EACH_SQRT_SOFTPLUS = 2 };

typedef struct {         // which experts a row goes to: see experts.h
  const float* logits;   // [rows, experts]
  int64_t logits_stride;
  const float* bias;     // [experts] or null: added to the scores for the choice alone
  const float* gains;    // [experts] or null: factors on the shares
  int32_t* chosen;       // [rows, active]
  int64_t chosen_stride;
  float* shares;         // [rows, active]
  int64_t shares_stride;
  float scale;           // factor on all shares
  int32_t experts;
  int32_t active;
  int32_t scores;        // HrScores
  int32_t normalise;     // shares sum up to `scale`
  int32_t groups;        // of experts, at most HR_MAX_EXPERT_GROUPS
  int32_t active_groups;
  int32_t rows;
  int32_t best;          // 1 or 2: so many of a group's experts say what it is worth
  int32_t unused;
} HrRoute;

typedef struct HrSpan {
  int32_t expert;        // −1: behind the last
  int32_t first;         // its first place, a multiple of six
  int32_t count;         // of its rows
} HrSpan;

typedef struct {         // whole experts are dealt out to ranks: each makes all of its own
  const int32_t* owners; // [experts]: the rank that has each
  int64_t* went;         // [experts]: what each has cost so far: 8 of a step and 1 of a row
  HrSpan* own;           // [experts + 1]: those of `spans` that this rank has
  float* values;         // [places, out] in memory of all ranks: what experts give, unsummed
  int64_t stride;
  int32_t rank;
  int32_t unused;
} HrDeal;

typedef struct {         // PLACE, UP, DOWN, SUM: the experts of ROUTE's choice
  HrQuantised x;         // [rows, in], null where no expert reads codes
  const float* dense;    // the same in fp32, null where none reads floats
  int64_t dense_stride;
  const int32_t* chosen; // [rows, active]
  int64_t chosen_stride;
  const float* shares;
  int64_t shares_stride;
  const HrPart* matrices;  // [experts, 3]: gate, up, down; y and bias are not used
  const float* up_bias;    // [experts, 2 · inner_size]: of gate, of up; or null
  const float* down_bias;  // [experts, out] or null
  HrQuantised placed;    // the rows by expert; null as x
  float* placed_dense;
  int64_t placed_stride;
  HrQuantised inner;     // [places, inner_size]; null where `down` reads floats
  float* inner_dense;    // the same in fp32; null where `down` reads codes
  int64_t inner_stride;
  float* y;              // [rows, out]
  int64_t y_stride;
  HrSpan* spans;         // [experts + 1]: the experts that somebody goes to, ascending
  int32_t* row_of;       // [places]
  float* share_of;       // [places]
  const HrDeal* deal;    // or null: then DOWN sums, and there is no SUM
  int32_t experts;
  int32_t active;
  int32_t in;
  int32_t inner_size;
  int32_t out;
  int32_t activation;
  int32_t rows;
  int32_t inside;        // shares multiply what experts read, and not what they give
} HrExperts;

#ifdef __cplusplus
}
#endif

// What the translation units of one ISA level call of each other.
//
// A level is several units, so that cores share the compiling and none waits for one. All but these
// functions have internal linkage (simd.h says why); these lie in a namespace of the level (HR_NAME),
// so that no level's is taken for another's. Between units go whole operators and runs of panels,
// nothing that is called more often.
#pragma once
#include "work.h"

#if !defined(HR_NAME)
#error "HR_NAME must be the namespace of the level that HR_LEVEL is"
#endif

#define HR_CODED_KINDS(EACH)                                                                    \
  EACH(Q4_0) EACH(Q4_1) EACH(Q5_0) EACH(Q5_1) EACH(Q8_0) EACH(Q4_K) EACH(Q5_K) EACH(Q6_K)       \
  EACH(MXFP4) EACH(INT4) EACH(INT8) EACH(NVFP4) EACH(IQ4_NL) EACH(IQ4_XS)
#define HR_DENSE_KINDS(EACH) EACH(F32) EACH(F16) EACH(BF16) EACH(E4M3)

namespace hr::HR_NAME {

// The panels [first, last) of a product with `rows` rows.
using PanelsOf = void(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                      int64_t last);

// Two panels, which are 32 outputs, for m rows from `row` on: the first 32 of sums[m][kSums].
using UnitOf = void(const HrQuantised& x, const HrPart& part, int64_t unit, int64_t row, int m,
                    int pass, int passes, float* sums);

// The same for up to kManyRows rows, from the first lane of a block on: sums[m][32].
using UnitsOf = void(const HrQuantised& x, const HrPart& part, int64_t unit, int64_t row, int m,
                     float* sums);

#define HR_EACH(Q)       \
  PanelsOf panels_##Q; \
  UnitOf unit_##Q;     \
  UnitsOf units_##Q;
HR_CODED_KINDS(HR_EACH)
#undef HR_EACH
PanelsOf panels_Q8_0_PLANES;  // the head's alone

#define HR_EACH(K) PanelsOf panels_##K;
HR_DENSE_KINDS(HR_EACH)
#undef HR_EACH

// Attention by what its KV is kept in.
using AttentionOf = void(const HrAttention& op, const Work& work);
AttentionOf attention_floats, attention_codes, attention_coarse;

void bidirectional(const HrBidirectional& op, const Work& work);
Room bidirectional_room(const HrBidirectional& op, const HrStep& step);

}  // namespace hr::HR_NAME

// The most likely token of each row, taken inside the head's product: no logits are written.
//
// Arithmetic: the product's own, and per row and panel of 16 outputs one comparison with the best
// so far (a load, a broadcast, a compare, a branch that is hardly ever taken): 9,496 panels of the
// default model are some 10 µs a row, where the logits were 0.6 MB a row to write and to read again
// (90 to 100 µs a row by one thread of the host). Values are those of the product bit for bit, so
// the token is that of an argmax over the logits: the lowest of equal ones, and 0 where a row has
// no number at all. Where bounds went before (bound.h), only panels that can hold it are computed.
#pragma once
#include "bound.h"

namespace {

static_assert(sizeof(HrBest) == 2 * sizeof(float), "a row of HrBest is two floats");

// BEST by a product of `linear`, whose outputs are compared where they end.
template <class Product>
HR_INLINE void best_by(const HrHead& op, const hr::Work& work, Product product) {
  const int64_t rows = work.rows(op.linear.rows);
  HrBest* mine = op.best + work.thread * op.stride;
  for (int64_t r = 0; r < rows; ++r) mine[r] = {-__builtin_inff(), INT32_MAX};
  HrPart part = op.linear.parts[0];
  part.y = reinterpret_cast<float*>(mine);
  part.y_stride = 2;
  part.accumulate = HR_KEEP;
  HrLinear linear = op.linear;
  linear.parts = &part;
  linear.count = 1;
  product(linear);
}

void op_best(const HrHead& op, const hr::Work& work) {
  best_by(op, work, [&](const HrLinear& linear) {
    if (bounded(op, work.rows(linear.rows))) return candidate_panels(op, linear, work);
    op_linear(linear, work);
  });
}

void op_pick(const HrHead& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.linear.rows);
  if (work.thread == 0 && rows > 0 && rows <= op.bounded) weigh_up(op, work);
  int64_t first, last;
  work.share(rows, &first, &last);
  for (int64_t r = first; r < last; ++r) {
    HrBest best = op.best[r];
    for (int t = 1; t < work.threads; ++t) {
      const HrBest other = op.best[t * op.stride + r];
      if (other.value > best.value || (other.value == best.value && other.token < best.token))
        best = other;
    }
    if (!op.found) op.tokens[r] = best.token == INT32_MAX ? 0 : best.token;
    else if (best.token == INT32_MAX) op.found[r] = best;
    else op.found[r] = {best.value, best.token + static_cast<int32_t>(op.first)};
  }
}

void op_agree(const HrAgree& op, const hr::Work& work) {
  int64_t first, last;
  work.share(work.step->r, &first, &last);
  for (int64_t r = first; r < last; ++r) {
    HrBest best = op.best[r];
    for (int32_t rank = 1; rank < op.ranks; ++rank) {  // Ranks have tokens in their order.
      const HrBest other = op.best[rank * op.stride + r];
      if (other.value > best.value || best.token == INT32_MAX) best = other;
    }
    op.tokens[r] = best.token == INT32_MAX ? 0 : best.token;
  }
}

}  // namespace

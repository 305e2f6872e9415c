// Spans: what a row sums up over 512 positions of its context, and how those sums become one.
//
// A sequence's positions are cut at multiples of kSpan. A row's online softmax starts anew with
// each span, and its spans are joined in order of position: always, at prefill and in any batch,
// so that who computes a span, one thread or several, is in no bit of the result (flash decoding,
// Dao et al. 2023, but with spans of a fixed length in place of a number of splits). A row that
// sees one span joins nothing: contexts up to 512 cost nothing.
//
// A join is 4 operations for 16 values of a row, so 112 vectors for seven rows of 64 values and the
// default model, where the 8 tiles of a span take 8 · 1,990 cycles: under one per cent.
#pragma once
#include "tiles.h"

namespace {

constexpr int kSpanTiles = 8;
constexpr int64_t kSpan = kSpanTiles * kTile;
constexpr float kFloor = -1e30f;   // what a running maximum starts from: finite, so that
                                   // 2^(−inf − kFloor) is 0 and not NaN

struct Sums {      // of rows, from one on that is the first of a product's
  float* highest;  // [rows][16]: the maxima of a product's rows in its first row's
  float* total;    // [rows][16]
  float* out;      // [rows][E]

  HR_ALWAYS Sums from(int64_t row, int64_t size) const {
    return {highest + 16 * row, total + 16 * row, out + size * row};
  }
};

constexpr int kBesideOut = 32;  // floats of a row's sums beside its E

// Sums of `rows` rows that lie one after the other.
HR_INLINE Sums sums_at(float* at, int64_t rows) {
  return {at, at + 16 * rows, at + kBesideOut * rows};
}

HR_INLINE void copy(const Sums& to, const Sums& from, int64_t m, int64_t size) {
  memcpy(to.highest, from.highest, 64);
  memcpy(to.total, from.total, static_cast<size_t>(16 * m) * 4);
  memcpy(to.out, from.out, static_cast<size_t>(size * m) * 4);
}

// The sums over the next span and those over all before it, of one product's m rows, to `to`, which
// may be either of them. A span in which a row sees nothing (total and out 0, the maximum kFloor)
// leaves that row's values as they are.
HR_INLINE void join(const Sums& to, const Sums& past, const Sums& span, int64_t m, int64_t size) {
  const F before = f_load(past.highest), here = f_load(span.highest), now = f_max(before, here);
  float keep[16], take[16];
  f_store(keep, f_exp2<5>(f_sub(before, now)));
  f_store(take, f_exp2<5>(f_sub(here, now)));
  f_store(to.highest, now);
  for (int64_t r = 0; r < m; ++r) {
    const F a = f_set(keep[r]), b = f_set(take[r]);
    const auto both = [&](float* sum, const float* x, const float* y) {
      f_store(sum, f_fma(f_load(y), b, f_mul(f_load(x), a)));
    };
    both(to.total + 16 * r, past.total + 16 * r, span.total + 16 * r);
    for (int64_t e = r * size; e < (r + 1) * size; e += 16)
      both(to.out + e, past.out + e, span.out + e);
  }
}

}  // namespace

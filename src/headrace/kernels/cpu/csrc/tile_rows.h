// Up to seven query rows over one tile: scores, softmax, results, and how they overlap.
//
// A unit is M rows over one tile. Its products take 64 · E / 16 · M dots of 16 lanes for the scores
// and as many for the results (default model, seven rows: 896 cycles each), its softmax 4 · M
// exponentials. One after the other each stage waits for the end of the one before. So stages of
// neighbouring units are woven: between the dots of a unit's scores stand the exponentials of the
// unit before, of which four instructions in eleven want the ports of the products, and a unit's
// maxima are sought while the results of the unit before are summed:
//
//   scores of u, weights of u − 1 | maxima of u | results of u − 1 | scores of u + 1, weights of u
//
// The order of units and of every sum stays that of the plain loop, so no bit depends on it.
#pragma once
#include "fold.h"
#include "rows.h"
#include "spans.h"

namespace {

constexpr int kRowsA = 7;          // query rows of a product, at most
constexpr float kLog2e = 1.44269504088896341f;

// Vectors of a row that are summed at once: as many as leave registers for what is woven in, and
// enough sums that no dot waits for the one before it.
template <int M>
constexpr int kAtOnce = M <= 3 ? 4 : 2;

struct QueryCodes {  // what is beside a query's codes
  float unit;        // what one counts
  int32_t zero;      // what the cells' 128 add to a product
  const float* plain;  // [E] in fp32, where keys are kept without a bias
};

template <class T>
struct Unit {
  int m = 0;            // rows; 0: there is none
  bool fresh;           // nothing is summed up yet: total and out may be anything
  const Tile<T>* tile;
  int count;            // positions of the tile that some row sees
  const typename T::Row* q;  // [E / wide][M][wide]
  float* highest;       // [16]: the maxima that weights refer to
  float* total;         // [M][16]
  float* out;           // [M][E]
  float* scores;        // [M][64]
  const QueryCodes* query;  // [M], of rows in codes
  float factor[16];     // what the rows' sums so far are multiplied by

  HR_ALWAYS void add_to_total(int row, F sum) const {
    if (!fresh) sum = f_fma(f_load(total + 16 * row), f_set(factor[row]), sum);
    f_store(total + 16 * row, sum);
  }
};

// The weights of `N` vectors of one row, from vector `first` on: to p, and their sum to sum.
template <class T, int N>
HR_INLINE void weigh(const Unit<T>& u, int row, int first, typename T::Row* p, F* sum) {
  const F high = f_set(u.highest[row]);
  F e[N];
#pragma GCC unroll 4
  for (int i = 0; i < N; ++i) {
    e[i] = T::exp2(f_sub(f_load(u.scores + row * kTile + 16 * (first + i)), high));
    *sum = f_add(*sum, e[i]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < N; i += 2) T::store2(p + row * kTile + 16 * (first + i), e[i], e[i + 1]);
}

// scores[m][64] = q[m] · K over the tile. With kBeside the weights of the unit `before` besides.
template <class T, int M, bool kBeside>
HR_INLINE void score_rows(const Unit<T>& u, int64_t size, const Tile<T>& ahead,
                          const Unit<T>& before, typename T::Row* p) {
  constexpr int N = kAtOnce<M>;
  const int64_t steps = size / T::wide, k_step = u.tile->k_step;
  F sums[M];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) sums[m] = f_zero();
  for (int first = 0; first < kVectors; first += N) {
    F acc[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) acc[m][v] = f_zero();
    const typename T::Cell *k[N], *next[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) k[v] = u.tile->k[first + v], next[v] = ahead.k[first + v];
    const typename T::Row* q = u.q;
    int64_t step = 0;
#pragma GCC unroll 8
    for (int row = 0; row < M; ++row) {
      if constexpr (kBeside) weigh<T, N>(before, row, first, p, &sums[row]);
      for (const int64_t end = steps * (row + 1) / M; step < end; ++step) {
        typename T::Vector w[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) {
          w[v] = T::load(k[v] + step * k_step);
          prefetch_l2(next[v] + step * k_step);
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
          auto x = T::spread(q + (step * M + m) * T::wide);
#pragma GCC unroll 4
          for (int v = 0; v < N; ++v) acc[m][v] = T::dot(acc[m][v], w[v], x);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) f_store(u.scores + m * kTile + 16 * (first + v), acc[m][v]);
  }
  if constexpr (kBeside)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) before.add_to_total(m, sums[m]);
}

// The same weights and totals by themselves.
template <class T>
void weigh_alone(const Unit<T>& u, typename T::Row* p) {
  for (int m = 0; m < u.m; ++m) {
    F sum = f_zero();
    weigh<T, kVectors>(u, m, 0, p, &sum);
    u.add_to_total(m, sum);
  }
}

struct InTile {  // [from, to)
  int from, to;
};

struct Places {  // of query rows: their own, and the last that each sees
  const int64_t *own, *last;
};

// What row m sees of the tile that begins at `start`.
HR_INLINE InTile seen_by(const Places& at, int m, int64_t window, int64_t start) {
  const int64_t first = window ? first_seen(at.own[m], window) - start : 0;
  const int64_t behind = at.last[m] + 1 - start;
  return {first < 0 ? 0 : first > kTile ? kTile : static_cast<int>(first),
          behind < 0 ? 0 : behind > kTile ? kTile : static_cast<int>(behind)};
}

// Scores as they count, the rows' maxima, and the factor of what is summed so far.
template <class T, int M>
HR_INLINE void settle(Unit<T>* u, float softcap, int64_t window, const Places& at,
                      int64_t start) {
  F best[M];
  int count = 0;
  const int64_t seen = at.last[0] + 1 - start;  // of the tile by the first row, who sees the least
  if (seen >= kTile && window == 0 && softcap <= 0) {
    count = kTile;
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const float* s = u->scores + m * kTile;
      best[m] = f_max(f_max(f_load(s), f_load(s + 16)), f_max(f_load(s + 32), f_load(s + 48)));
    }
  } else {
    for (int m = 0; m < M; ++m) {
      const auto [from, to] = seen_by(at, m, window, start);
      if (to > count) count = to;
      float* s = u->scores + m * kTile;
      best[m] = f_set(-__builtin_inff());
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        F x = f_load(s + 16 * i);
        if (softcap > 0) x = f_mul(f_set(softcap * kLog2e), f_tanh(f_div(x, f_set(softcap))));
        x = f_range(x, from - 16 * i, to - 16 * i, -__builtin_inff());
        f_store(s + 16 * i, x);
        best[m] = f_max(best[m], x);
      }
    }
  }
  const F before = f_load(u->highest), now = f_max(before, f_fold<Max>(best));
  f_store(u->factor, T::exp2(f_sub(before, now)));
  f_store(u->highest, now);
  u->count = count;
}

// out[m] = out[m] · factor[m] + p[m] · V over 16 · W columns of E; p: [M][64].
template <class T, int M, int W>
HR_INLINE void value_columns(const Unit<T>& u, const typename T::Row* p, int64_t size,
                             int64_t column, const Tile<T>& ahead) {
  F acc[M][W];
  float* out = u.out + column;
  if (u.fresh)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) acc[m][w] = f_zero();
  else
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w)
        acc[m][w] = f_mul(f_load(out + m * size + 16 * w), f_set(u.factor[m]));
  for (int block = 0; block * 16 < u.count; ++block) {
    const typename T::Cell* v = u.tile->v[block] + column * T::wide;
    const typename T::Cell* next = ahead.v[block] + column * T::wide;
    const int left = u.count - 16 * block;
    const int steps = ((left < 16 ? left : 16) + T::wide - 1) / T::wide;
    for (int j = 0; j < steps; ++j, v += size * T::wide, next += size * T::wide) {
      typename T::Vector vv[W];
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
        vv[w] = T::load(v + 16 * T::wide * w);
        prefetch_l2(next + 16 * T::wide * w);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        auto x = T::spread(p + m * kTile + 16 * block + j * T::wide);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) acc[m][w] = T::dot(acc[m][w], vv[w], x);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) f_store(out + m * size + 16 * w, acc[m][w]);
}

template <class T, int M>
HR_INLINE void value_rows(const Unit<T>& u, const typename T::Row* p, int64_t size,
                          const Tile<T>& ahead) {
  constexpr int W = kAtOnce<M>;
  int64_t column = 0;
  for (; column + 16 * W <= size; column += 16 * W)
    value_columns<T, M, W>(u, p, size, column, ahead);
  for (; column < size; column += 16) value_columns<T, M, 1>(u, p, size, column, ahead);
}

#define HR_ROWS7(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)

// What is left of a unit whose maxima are known.
template <class T>
void finish(Unit<T>* u, typename T::Row* p, int64_t size) {
  if (!u->m) return;
  weigh_alone(*u, p);
  switch (u->m) {
#define HR_CASE(M) case M: value_rows<T, M>(*u, p, size, *u->tile); break;
    HR_ROWS7(HR_CASE)
#undef HR_CASE
  }
  u->m = 0;
}

// The next unit up to its maxima, and what is left of the one before.
template <class T, int M>
__attribute__((noinline)) void advance(Unit<T>* u, Unit<T>* before, float softcap, int64_t window,
                                       const Places& at, int64_t start, int64_t size,
                                       const Tile<T>& ahead, typename T::Row* p) {
  if (before->m != M) {
    finish(before, p, size);
    score_rows<T, M, false>(*u, size, ahead, *before, p);
    settle<T, M>(u, softcap, window, at, start);
    return;
  }
  score_rows<T, M, true>(*u, size, ahead, *before, p);
  settle<T, M>(u, softcap, window, at, start);
  value_rows<T, M>(*before, p, size, ahead);
  before->m = 0;
}

}  // namespace

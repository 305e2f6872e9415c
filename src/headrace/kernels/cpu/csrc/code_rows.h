// Up to seven query rows over one tile of KV in codes: whole numbers from the query to the result.
//
// The arithmetic. A query's numbers are codes of fifteen bits with a unit of their own; a product
// with a key is an exact whole number, and the score that number times both units. Weights are
// 2^(score − the tile's highest), in [0, 1] with a one among them in whatever context, flat or
// peaked: so fifteen bits are relative to a row's largest weight in the tile, and what the tile
// counts beside others goes to its results as a float. The sum of weights is of the floats.
//
// A unit of seven rows and E numbers is 2 · 7 · 64 · E / 64 dots each for scores and results where
// VNNI is (codes.h), 896 for E = 64, as many as vdpbf16ps takes with bf16, and 28 vectors of
// exponentials. It reads 64 · 2 · E bytes and 256 of scales (int8), 0.52 of bf16's.
//
// Lines of the tile after the next are asked for evenly, three quarters of K's and V's beside the
// products and the last quarters beside the softmax: a core has sixteen requests on their way, and
// what is asked for beyond holds up everything behind it (all at once: 1.5 times the unit's time).
//
// Coarse rows, an encoder's of weights in codes, have queries and weights of eight bits: half the
// dots where a dot takes two planes, beside products around them that are of eight bits themselves.
//
// Every operation is the same at all levels and for all ways to cut a step: products are exact, the
// others elementwise, and what a row sees of a tile follows from its places alone.
#pragma once
#include "code_tiles.h"
#include "tile_rows.h"

namespace {

// Planes that a dot takes, and vectors that are summed at once: with one plane there is room for more.
template <bool kCoarse>
constexpr int kTaken = kCoarse ? 1 : kPlanes;
template <int M, bool kCoarse>
constexpr int kCodesAtOnce = kTaken<kCoarse> < kPlanes && M <= 6 ? 4 : kAtOnce<M>;

// Codes of a query [E] · scale to `codes`; where keys have biases apart the products to `plain`.
HR_INLINE QueryCodes take_codes(const float* q, int64_t size, F scale, bool coarse, int16_t* codes,
                                float* plain) {
  F top = f_zero(), bad = f_zero();
  for (int64_t e = 0; e < size; e += 16) {
    const F x = f_mul(f_load(q + e), scale);
    top = f_max(top, f_max(x, f_sub(f_zero(), x)));
    bad = f_fma(x, f_zero(), bad);
    if (plain) f_store(plain + e, x);
  }
  const float highest = f_highest(top), none = f_sum(bad);
  if (none != 0 || highest < kNothing) {
    memset(codes, 0, static_cast<size_t>(size) * 2);
    return {none, 0, plain};  // not a number where one of the query's is none, so that no score is
  }
  const float most = coarse ? kCoarseRowCodes : kRowCodes;
  const F each = f_set(most / highest);
  I total = i_zero();
  for (int64_t e = 0; e < size; e += 16) {
    const I code = i_round(f_mul(f_mul(f_load(q + e), scale), each));
    total = i_add(total, code);
    store_query(codes + e, code);
  }
  return {highest / most, kCellZero * i_sum(total), plain};
}

// Sum number n of row m, of one plane or of both.
template <int kOf, int M, int N>
HR_INLINE I planes_sum(const I (&acc)[kOf][M][N], int m, int n) {
  if constexpr (kOf == 1) return acc[0][m][n];
  else return whole_sum(acc[0][m][n], acc[1][m][n]);
}

// scores[m][64] = q[m] · K over the tile, but for biases.
template <int M, bool kCoarse>
HR_INLINE void score_codes(const Unit<Codes>& u, int64_t size, const Tile<Codes>& ahead) {
  constexpr int N = kCodesAtOnce<M, kCoarse>, kOf = kTaken<kCoarse>;
  const int64_t steps = size / 4, k_step = u.tile->k_step, fetched = steps - size / 16 - 1;
  for (int first = 0; first < kVectors; first += N) {
    I acc[kOf][M][N];
#pragma GCC unroll 2
    for (int plane = 0; plane < kOf; ++plane)
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) acc[plane][m][v] = i_zero();
    const uint8_t *k[N], *next[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) k[v] = u.tile->k[first + v], next[v] = ahead.k[first + v];
    const int16_t* q = u.q;
    for (int64_t step = 0; step < steps; ++step, q += 4 * M) {
      CellsK cells[N];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        cells[v] = k_cells(c_load(k[v] + step * k_step));
        prefetch_l2(next[v]);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Plane upper = spread<kPlanes - kOf>(q + 4 * m);
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) acc[0][m][v] = k_dot(acc[0][m][v], cells[v], upper);
        if constexpr (kOf == 2) {
          const Plane lower = spread<1>(q + 4 * m);
#pragma GCC unroll 4
          for (int v = 0; v < N; ++v) acc[1][m][v] = k_dot(acc[1][m][v], cells[v], lower);
        }
      }
      const int64_t forth = step < fetched ? k_step : 0;
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) next[v] += forth;
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const I zero = i_set(u.query[m].zero);
      const F unit = f_set(u.query[m].unit);
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        const F counts = f_mul(f_load(u.tile->k_scale + 16 * (first + v)), unit);
        const F product = f_from_i(i_sub(planes_sum<kOf>(acc, m, v), zero));
        f_store(u.scores + m * kTile + 16 * (first + v), f_mul(product, counts));
      }
    }
  }
}

// What the biases of the tile's keys add to a row's scores.
HR_INLINE void add_biases(const Tile<Codes>& tile, const float* q, int64_t size, F (&x)[kVectors]) {
  for (const Turned *b = tile.biases, *end = b + tile.bias_count; b < end; ++b) {
    const float low = q[b->low], high = b->high < 0 ? 0.0f : q[b->high];
    const F along = f_set(__builtin_fmaf(high, b->y, low * b->x));
    const F across = f_set(__builtin_fmaf(-low, b->y, high * b->x));
    const float *cosine = tile.turns + b->low * kTile, *sine = cosine + size * kTile;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i)
      x[i] = f_fma(along, f_load(cosine + 16 * i), f_fma(across, f_load(sine + 16 * i), x[i]));
  }
}

// What of a tile row m sees: [from, to), and all rows together [0, count).
struct Sight {
  int from[kRowsA], to[kRowsA];
  int count = 0;
  bool whole = true;  // every row sees all

  HR_ALWAYS Sight(int rows, const Places& at, int64_t window, int64_t start) {
    for (int m = 0; m < rows; ++m) {
      const InTile seen = seen_by(at, m, window, start);
      from[m] = seen.from;
      to[m] = seen.to;
      if (to[m] > count) count = to[m];
      whole &= from[m] == 0 && to[m] == kTile;
    }
  }
};

// Scores as they count → their maxima, no less than kFloor.
template <int M>
HR_INLINE F settle_codes(const Unit<Codes>& u, float softcap, const Sight& sight, int64_t size) {
  F best[M];
  const bool plain = sight.whole && softcap <= 0 && u.tile->bias_count == 0;
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    float* s = u.scores + m * kTile;
    F x[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) x[i] = f_load(s + 16 * i);
    if (!plain) {
      add_biases(*u.tile, u.query[m].plain, size, x);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        if (softcap > 0) x[i] = f_mul(f_set(softcap * kLog2e), f_tanh(f_div(x[i], f_set(softcap))));
        x[i] = f_range(x[i], sight.from[m] - 16 * i, sight.to[m] - 16 * i, -__builtin_inff());
        f_store(s + 16 * i, x[i]);
      }
    }
    best[m] = f_max(f_max(x[0], x[1]), f_max(x[2], x[3]));
  }
  return f_max(f_fold<Max>(best), f_set(kFloor));
}

// out[m] = out[m] · factor[m] + unit[m] · (p[m] · V) over 16 · W columns of E. kHalves: V is looked up
// here, and of its vectors the odd ones are of columns E / 2 further on.
template <int M, int W, bool kHalves, bool kCoarse>
HR_INLINE void code_columns(const Unit<Codes>& u, const int16_t* p, const float* unit, int count,
                            int64_t size, int64_t column, const Tile<Codes>& ahead) {
  constexpr int kOf = kTaken<kCoarse>;
  I acc[kOf][M][W];
#pragma GCC unroll 2
  for (int plane = 0; plane < kOf; ++plane)
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) acc[plane][m][w] = i_zero();
  const int64_t row = kHalves ? 2 * size : 4 * size;
  for (int block = 0; 16 * block < count; ++block) {
    const uint8_t *v = u.tile->v[block] + 4 * column, *next = ahead.v[block] + 4 * column;
    const int left = count - 16 * block, quads = left < 16 ? (left + 3) / 4 : 4;
    const int16_t* x = p + 16 * block;
    for (int j = 0; j < quads; ++j, v += row, next += j < 3 ? row : 0, x += 4) {
      CellsV cells[W];
#pragma GCC unroll 4
      for (int w = 0; w < W; ++w) {
        if constexpr (kHalves) {
          cells[w] = v_cells(w % 2 ? levels_above(v + 32 * (w - 1)) : levels_below(v + 32 * w));
          if (w % 2 == 0) prefetch_l2(next + 32 * w);
        } else {
          cells[w] = v_cells(c_load(v + 64 * w));
          prefetch_l2(next + 64 * w);
        }
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Plane upper = spread<kPlanes - kOf>(x + m * kTile);
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) acc[0][m][w] = v_dot(acc[0][m][w], cells[w], upper);
        if constexpr (kOf == 2) {
          const Plane lower = spread<1>(x + m * kTile);
#pragma GCC unroll 4
          for (int w = 0; w < W; ++w) acc[1][m][w] = v_dot(acc[1][m][w], cells[w], lower);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    const F counts = f_set(unit[m]), factor = f_set(u.factor[m]);
    float* out = u.out + m * size + column;
#pragma GCC unroll 4
    for (int w = 0; w < W; ++w) {
      float* to = out + (kHalves ? w / 2 * 16 + w % 2 * (size / 2) : 16 * w);
      F sum = f_mul(f_from_i(planes_sum<kOf>(acc, m, w)), counts);
      if (!u.fresh) sum = f_fma(f_load(to), factor, sum);
      f_store(to, sum);
    }
  }
}

template <int M, bool kCoarse>
__attribute__((noinline)) void code_rows(Unit<Codes>* u, float softcap, int64_t window,
                                         const Places& at, int64_t start, int64_t size,
                                         const Tile<Codes>& ahead, int16_t* p) {
  score_codes<M, kCoarse>(*u, size, ahead);
  const Sight sight(M, at, window, start);
  const F before = f_load(u->highest), here = settle_codes<M>(*u, softcap, sight, size);
  const F now = f_max(before, here);
  const int64_t lines = (u->tile->halves ? 2 : 4) * size / 64;  // of four positions of V
  float high[16], share[16], unit[M];
  f_store(high, here);
  f_store(share, f_exp2<5>(f_sub(here, now)));  // what the tile counts beside all so far
  f_store(u->factor, f_exp2<5>(f_sub(before, now)));
  f_store(u->highest, now);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    float own[kTile];
    const float* rate = u->tile->rate;
    unit[m] = share[m] * (sight.whole ? u->tile->unit
                                      : find_rates(u->tile->v_scale, sight.from[m], sight.to[m], own));
    if constexpr (kCoarse) unit[m] *= kWeightCodes / kCoarseWeightCodes;
    if (!sight.whole) rate = own;
    const F highest = f_set(high[m]);
    F sum = f_zero();
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const F weight = f_exp2<4>(f_sub(f_load(u->scores + m * kTile + 16 * i), highest));
      sum = f_add(sum, weight);
      for (int64_t line = m; line < size / 16; line += M)
        prefetch_l2(ahead.k[i] + (size / 4 - 1 - line) * u->tile->k_step);
      for (int64_t line = m; line < lines; line += M)
        prefetch_l2(ahead.v[i] + 3 * 64 * lines + 64 * line);
      F whole = f_mul(weight, f_load(rate + 16 * i));
      if constexpr (kCoarse) whole = f_mul(whole, f_set(kCoarseWeightCodes / kWeightCodes));
      store_weights(p + m * kTile + 16 * i, i_round(whole));
    }
    u->add_to_total(m, f_mul(sum, f_set(share[m])));
  }
  constexpr int W = kCodesAtOnce<M, kCoarse>;
  int64_t column = 0;
  if (u->tile->halves) {
    for (; column + 8 * W <= size / 2; column += 8 * W)
      code_columns<M, W, true, kCoarse>(*u, p, unit, sight.count, size, column, ahead);
    for (; column < size / 2; column += 16)
      code_columns<M, 2, true, kCoarse>(*u, p, unit, sight.count, size, column, ahead);
    return;
  }
  for (; column + 16 * W <= size; column += 16 * W)
    code_columns<M, W, false, kCoarse>(*u, p, unit, sight.count, size, column, ahead);
  for (; column < size; column += 16)
    code_columns<M, 1, false, kCoarse>(*u, p, unit, sight.count, size, column, ahead);
}

}  // namespace

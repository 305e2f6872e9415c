// Dense panels of bf16 by activations rounded to bf16, two of K at a time (vdpbf16ps): for CPUs
// with AVX512-BF16, with tiles or without.
//
// The arithmetic. One instruction adds two products to each of sixteen sums, at the rate of an fma
// that adds one (Zen 4: one of 512 bits a cycle): half the instructions of a chain of fp32 (chain.h),
// whose tiles these are: M rows by P panels in registers. A panel has k and k + 1 of an output 32
// bytes apart; a permutation puts them side by side as they are loaded, two for 24 products: from
// L1 and L2 a tile has 0.98 of what products alone have.
//
// Memory. A thread rounds the rows of its items once: a block of K of a tile's rows is
// M lines one after the other, so that a tile reads one stream, however far apart its rows were.
// More rows than kMost are several blocks of rows, and a thread's share is whole blocks of them:
// no two threads round the same rows of a long prompt.
//
// Bits. A sum is one chain over K by twos: fma(even, fma(odd, sum)), each rounded once to nearest
// even; numbers below the least normal one are taken, and given, as none. It depends on neither
// rows nor panels beside. Not the bits of a chain of fp32, nor those of tiles, so that this level,
// too, serves by name only and is in an engine's identity.
#pragma once
#include "named.h"

namespace {

constexpr int64_t kMost = 96;   // rows of a block: their K is rounded at once
constexpr int64_t kPanels = 16;  // of a run, at most
constexpr int kPairs = kBlockK / 2;

// `rows` rows from `row` on → [tile][block of K][row of the tile][32].
void round_rows(const HrLinear& op, int64_t in, int64_t row, int64_t rows, uint16_t* out) {
  for (int64_t m; rows > 0; rows -= m, row += m, out += m * in) {
    m = tile_of(rows);
    for (int64_t i = 0; i < m; ++i) {
      const float* x = op.dense + (row + i) * op.dense_stride;
      for (int64_t b = 0; b < in / kBlockK; ++b, x += kBlockK)
        _mm512_store_si512(
            out + (b * m + i) * kBlockK,
            (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(x)));
    }
  }
}

// What a tile reads and writes, as ChainTile; x: rounded rows, [block of K][M][32].
struct RoundedTile {
  const uint16_t* x;
  const uint8_t* w;  // panels [k][16], `panel` bytes from one to the next
  int64_t panel, in;
  float* y;  // [M][P][16]
};

// kLines as in chain.h: who asks for the weights' lines.
template <int M, int P, Lines kLines = kLeft>
__attribute__((noinline)) void rounded(const RoundedTile& t) {
  constexpr int64_t ahead = kLines == kToL1 ? kEarlyInL1 : kEarly;
  constexpr auto ask = kLines == kToL1 ? prefetch_l1 : prefetch_l2;
  const __m512i turns = _mm512_load_si512(kTurns);
  const int64_t panel = t.panel;
  const uint16_t* x = t.x;
  const uint8_t* w = t.w;
  int64_t early = ahead;
  __m512 acc[M][P];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) acc[m][p] = _mm512_setzero_ps();
  for (int64_t left = t.in; left > 0; left -= kBlockK, x += (M - 1) * kBlockK) {
    // At its end a stream goes on with its next panel, P further.
    if (kLines != kLeft && left * 2 * HR_PANEL <= ahead) early = ahead + (P - 1) * panel;
#pragma GCC unroll 2
    for (int i = 0; i < kPairs; ++i, x += 2, w += 64) {
      __m512bh v[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        if constexpr (kLines != kLeft) ask(w + p * panel + early);
        v[p] = (__m512bh)_mm512_permutexvar_epi16(turns, _mm512_loadu_si512(w + p * panel));
      }
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        memcpy(&pair, x + m * kBlockK, 4);
        const auto a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) acc[m][p] = _mm512_dpbf16_ps(acc[m][p], v[p], a);
      }
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) _mm512_store_ps(t.y + (m * P + p) * HR_PANEL, acc[m][p]);
}

template <int P, Lines kLines>
HR_INLINE void rounded_tile(int64_t rows, const RoundedTile& t) {
#define HR_CASE(M) \
  case M: return rounded<M, P, kLines>(t);
  switch (rows) {
    HR_CASE(1) HR_CASE(2) HR_CASE(3) HR_CASE(4) HR_CASE(5) HR_CASE(6) HR_CASE(7) HR_CASE(8)
    HR_CASE(9) HR_CASE(10) HR_CASE(11) HR_CASE(12)
  }
#undef HR_CASE
}

// Up to kStreamed rows, which are all, by P panels: the hardware fetches, or is asked to.
template <int P>
void rounded_few(const HrPart& part, int64_t rows, int64_t panel, const uint16_t* x) {
  alignas(64) float sums[kStreamed * HR_PANEL * P];
  const int64_t bytes = hr::panel_bytes(HR_BF16, part.in);
  const RoundedTile of{x, part.data + panel * bytes, bytes, part.in, sums};
#define HR_FETCHED(lines) (rows == 1 ? rounded<1, P, lines>(of) : rounded<2, P, lines>(of))
  if (!hr::fetching.few) HR_FETCHED(kLeft);
  else if (hr::fetching.near) HR_FETCHED(kToL1);
  else HR_FETCHED(kToL2);
#undef HR_FETCHED
  finish_tile<P>(part, sums, 0, rows, panel);
}

// `rows` rows from `row` on, rounded at x, by P panels.
template <int P>
void rounded_tiles(const HrPart& part, int64_t row, int64_t rows, int64_t panel,
                   const uint16_t* x) {
  alignas(64) float sums[kTallest * HR_PANEL * P];
  const int64_t bytes = hr::panel_bytes(HR_BF16, part.in);
  for (int64_t done = 0, tile; done < rows; done += tile, x += tile * part.in) {
    tile = tile_of(rows - done);
    const RoundedTile of{x, part.data + panel * bytes, bytes, part.in, sums};
    if (done == 0) rounded_tile<P, kToL2>(tile, of);
    else rounded_tile<P, kLeft>(tile, of);
    finish_tile<P>(part, sums, row + done, tile, panel);
  }
}

void rounded_panels(const HrPart& part, int64_t row, int64_t rows, int64_t first, int64_t last,
                    const uint16_t* x) {
  if (rows <= kStreamed)
    for (; first + kStreams <= last; first += kStreams) rounded_few<kStreams>(part, rows, first, x);
  for (; first + 2 <= last; first += 2) rounded_tiles<2>(part, row, rows, first, x);
  if (first < last) rounded_tiles<1>(part, row, rows, first, x);
}

// Pairs of panels, three runs for each thread; few rows as elsewhere.
inline int64_t rounded_run(const HrPart& part, int64_t rows, int threads) {
  if (!in_blocks(part) || rows <= kStreamed) return run_of(part, rows, threads);
  const int64_t fair = hr::panel_count(part.out) / (3 * threads) / 2 * 2;
  return fair < 2 ? 2 : fair < kPanels ? fair : kPanels;
}

struct Rounded {
  static int64_t room(int64_t in) { return 2 * kMost * in; }

  static void linear(const HrLinear& op, const hr::Work& work) {
    const int64_t rows = work.rows(op.rows);
    const auto runs = [&](const HrPart& part) {
      const int64_t run = rounded_run(part, rows, work.threads);
      return (hr::panel_count(part.out) + run - 1) / run;
    };
    int64_t total = 0;
    for (int32_t i = 0; i < op.count; ++i) total += runs(op.parts[i]);
    auto* x = reinterpret_cast<uint16_t*>(work.scratch);
    const int64_t in = width_in_blocks(op), blocks = (rows + kMost - 1) / kMost;
    int64_t item, ready = -1;  // whose rows are at x
    for (int victim = 0; work.next_in_line(total * blocks, &victim, &item);) {
      const int64_t block = item / total, row = rows * block / blocks;
      const int64_t count = rows * (block + 1) / blocks - row;
      const HrPart* part = op.parts;
      for (item %= total; item >= runs(*part); ++part) item -= runs(*part);
      const int64_t run = rounded_run(*part, rows, work.threads), first = item * run;
      const int64_t panels = hr::panel_count(part->out);
      const int64_t last = first + run < panels ? first + run : panels;
      if (!in_blocks(*part)) {
        if (block == 0) part_panels(op, *part, rows, first, last);
        continue;
      }
      if (ready != block) round_rows(op, in, row, count, x);
      ready = block;
      rounded_panels(*part, row, count, first, last, x);
    }
  }
};

}  // namespace

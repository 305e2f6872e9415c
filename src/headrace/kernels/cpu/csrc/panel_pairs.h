// Many rows by pairs of panels that are decoded once: products of prompts and of wide batches.
//
// The arithmetic of panel.h, its sums and their order, so the same bits. What differs is what lies in
// registers. panel.h multiplies up to twelve rows by one panel: each of the eight products of a unit
// and row loads its own four bytes of activations, and each pass of rows decodes the codes again. Here
// a pair of panels is decoded into L1 for kBlockUnits of K, and six rows meet both panels.
//
// Counts for a unit and row, with what a core of Ice Lake (model 106) needs for each: 0.175 ns for a
// 512-bit operation on its two ports, 0.26 ns for a load.
//
//                                         panel.h, 12 rows     here        limit here of the rate
//                                         operations, loads                   of registers
//   one scale a unit (Q5_0, Q8_0, …)          14       10.7    11    6.5     8/11 = 73 %
//   with minima (Q4_K, INT4)                  13       11.4    12    7.2     8/12 = 67 %
//   two scales a unit (Q6_K, NVFP4)           16       12.7    13    8.8     8/13 = 62 %
//
// A product takes 5.5 cycles there: fewer than twelve sums at once leave the ports idle (eight: 72 %),
// and two sets of sums do not fit. Two scales therefore take three rows, both halves of a unit at once.
//
// Loops, from outside: rows (kManyRows, whose sums are kept), K (a block), pairs of panels, a tile.
#pragma once
#include "panel.h"

#if HR_LEVEL >= 4  // others have no product of bytes that adds to its sum

namespace {

constexpr int kBlockUnits = 16;  // of a decoded pair: 20 KiB of L1, and whole blocks of every format

// Floats beside a unit's codes: scales of both panels, and minima or second scales.
template <class Q>
constexpr int kUnitFloats = Q::mode == kPlain ? 2 * HR_PANEL : 4 * HR_PANEL;

template <class Q>
struct alignas(64) DecodedUnit {
  uint8_t codes[8][2][64];  // step, panel
  float scales[kUnitFloats<Q>];  // [1 or 2][2][16]
};

// Units [0, units) of one panel, the first of a block, into one side of a pair.
template <class Q>
HR_INLINE void decode_side(Panel panel, int units, int side, DecodedUnit<Q>* to) {
  constexpr hr::Format f = Q::format;
  const uint8_t *block = panel.data, *low = panel.low;
  for (int at = 0; at < units; block += f.block_bytes())
    for (int u = 0; u < f.units() && at < units; ++u, ++at, ++to, low += f.low_bytes) {
      const uint8_t* unit = block + f.header + u * f.unit_bytes();
      const uint8_t* q = unit + f.unit_extra;
#define HR_BODY(S) c_store(to->codes[S][side], code_of<Q, S, true>(q, low));
      if constexpr (f.low_bytes != 0) HR_PAIRS8(HR_BODY);
      else HR_STEPS8(HR_BODY);
#undef HR_BODY
      const F d = Q::scale(block, unit);
      float* first = to->scales + side * HR_PANEL;
      float* second = first + 2 * HR_PANEL;
      if constexpr (Q::mode == kSub) {
        f_store(first, f_mul(d, Q::sixteenth(unit)));
        f_store(second, f_mul(d, Q::sixteenth(unit + 16)));
      } else {
        f_store(first, d);
        if constexpr (Q::mode == kMin) f_store(second, Q::min(block, unit));
      }
    }
}

// The products of a unit. Blocks of assembler: of statements GCC 12 makes thirty copies of sums, and
// moves loads to where registers are short.
#define HR_CODES(reg, step, panel) \
  "vmovdqa64 128*(" step ")+64*" panel "(%[codes]), %%zmm" reg "\n\t"
#define HR_ROW(step, row, low, high, a, b)                         \
  "vpbroadcastd 4*(" step ")+64*" row "(%[lanes]), %%zmm31\n\t"    \
  "vpdpbusd %%zmm31, %%zmm" low ", %[" a "]\n\t"                   \
  "vpdpbusd %%zmm31, %%zmm" high ", %[" b "]\n\t"
#define HR_PAIRED(BODY, s)                                                                         \
  __asm__(BODY("0") BODY("1") BODY("2") BODY("3")                                                  \
          : [a0] "+v"(s[0].v), [b0] "+v"(s[1].v), [a1] "+v"(s[2].v), [b1] "+v"(s[3].v),            \
            [a2] "+v"(s[4].v), [b2] "+v"(s[5].v), [a3] "+v"(s[6].v), [b3] "+v"(s[7].v),            \
            [a4] "+v"(s[8].v), [b4] "+v"(s[9].v), [a5] "+v"(s[10].v), [b5] "+v"(s[11].v)           \
          : [codes] "r"(codes), [lanes] "r"(lanes), "m"(*reinterpret_cast<const Codes4*>(codes)),  \
            "m"(*reinterpret_cast<const HrSix*>(lanes))                                            \
          : "xmm27", "xmm28", "xmm29", "xmm30", "xmm31")

// Four steps of six rows: s[row][panel].
HR_INLINE void six_steps(const uint8_t* codes, const int8_t* lanes, I* s) {
  using Codes4 = uint8_t[4 * 2 * 64];
#define HR_STEP(S)                                                                            \
  HR_CODES("29", S, "0") HR_CODES("30", S, "1") HR_ROW(S, "0", "29", "30", "a0", "b0")        \
  HR_ROW(S, "1", "29", "30", "a1", "b1") HR_ROW(S, "2", "29", "30", "a2", "b2")               \
  HR_ROW(S, "3", "29", "30", "a3", "b3") HR_ROW(S, "4", "29", "30", "a4", "b4")               \
  HR_ROW(S, "5", "29", "30", "a5", "b5")
  HR_PAIRED(HR_STEP, s);
#undef HR_STEP
}

// All eight steps of three rows, each half of K apart: s[half][row][panel].
HR_INLINE void three_steps(const uint8_t* codes, const int8_t* lanes, I* s) {
  using Codes4 = uint8_t[8 * 2 * 64];
#define HR_STEP(S)                                                                            \
  HR_CODES("27", S, "0") HR_CODES("28", S, "1") HR_CODES("29", "4+" S, "0")                   \
  HR_CODES("30", "4+" S, "1") HR_ROW(S, "0", "27", "28", "a0", "b0")                          \
  HR_ROW(S, "1", "27", "28", "a1", "b1") HR_ROW(S, "2", "27", "28", "a2", "b2")               \
  HR_ROW("4+" S, "0", "29", "30", "a3", "b3") HR_ROW("4+" S, "1", "29", "30", "a4", "b4")     \
  HR_ROW("4+" S, "2", "29", "30", "a5", "b5")
  HR_PAIRED(HR_STEP, s);
#undef HR_STEP
}
#undef HR_PAIRED
#undef HR_ROW
#undef HR_CODES

// Products of M rows, without assembler where they are few: s as above.
template <int M, int kFrom, int kSteps>
HR_INLINE void steps(const uint8_t* codes, const int8_t* lanes, I* s) {
#pragma GCC unroll 8
  for (int k = kFrom; k < kFrom + kSteps; ++k) {
    const C w0 = c_load(codes + 128 * k), w1 = c_load(codes + 128 * k + 64);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const I x = i_spread(reinterpret_cast<const int32_t*>(lanes + 64 * m) + k);
      s[2 * m] = i_dot(s[2 * m], w0, x);
      s[2 * m + 1] = i_dot(s[2 * m + 1], w1, x);
    }
  }
}

// In a register: as an operand in memory each use would be a load.
HR_INLINE F held(F x) {
  __asm__("" : "+v"(x.v));
  return x;
}
HR_INLINE F held(const float* p) { return held(f_load(p)); }

// M rows by a decoded pair: sums[m][stride] of 32 outputs, added to where `going`. `lanes`: of the
// first row, in its block of six.
template <class Q, int M>
__attribute__((noinline)) void pair_rows(const DecodedUnit<Q>* unit, int units, const HrLane* lanes,
                                         bool going, float* sums, int64_t stride) {
  F acc[M][2];
#define HR_EACH                                       \
  _Pragma("GCC unroll 6") for (int m = 0; m < M; ++m) \
      _Pragma("GCC unroll 2") for (int p = 0; p < 2; ++p)
  HR_EACH acc[m][p] = going ? f_load(sums + m * stride + p * HR_PANEL) : f_zero();
  for (int u = 0; u < units; ++u, ++unit, lanes += HR_SIX) {
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) prefetch_l1(lanes + m + 2 * HR_SIX);
    const uint8_t* codes = unit->codes[0][0];
    const float* scales = unit->scales;
    if constexpr (Q::mode == kSub) {
      // (d0 · Σ0 + d1 · Σ1) · scale_x
      I sum[2][M][2];
      HR_EACH sum[0][m][p] = half_from<Q>(&lanes[m].unit.low32);
      HR_EACH sum[1][m][p] = half_from<Q>(&lanes[m].unit.high32);
      if constexpr (M == HR_SIX / 2) {
        three_steps(codes, lanes->codes, sum[0][0]);
      } else {
        steps<M, 0, 4>(codes, lanes->codes, sum[0][0]);
        steps<M, 4, 4>(codes, lanes->codes, sum[1][0]);
      }
      const F d[4] = {held(scales), held(scales + 16), held(scales + 32), held(scales + 48)};
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const F scale = held(f_set(lanes[m].unit.scale));
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
          const F first = f_mul(d[p], f_from_i(sum[0][m][p]));
          acc[m][p] = f_fma(f_fma(d[2 + p], f_from_i(sum[1][m][p]), first), scale, acc[m][p]);
        }
      }
    } else {
      I sum[M][2];
      HR_EACH sum[m][p] = Q::mode == kMin ? i_zero() : start_from<Q>(lanes[m].unit);
      if constexpr (M == HR_SIX) {
        six_steps(codes, lanes->codes, sum[0]);
        six_steps(codes + 512, lanes->codes + 16, sum[0]);
      } else {
        steps<M, 0, 8>(codes, lanes->codes, sum[0]);
      }
      const F d[2] = {held(scales), held(scales + 16)};
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const F scale = held(f_set(lanes[m].unit.scale));
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p)
          acc[m][p] = f_fma(f_from_i(sum[m][p]), f_mul(d[p], scale), acc[m][p]);
      }
      if constexpr (Q::mode == kMin) {
        const F low[2] = {held(scales + 32), held(scales + 48)};
#pragma GCC unroll 6
        for (int m = 0; m < M; ++m) {
          const F total = held(f_set(lanes[m].unit.sum));
#pragma GCC unroll 2
          for (int p = 0; p < 2; ++p) acc[m][p] = f_fma(low[p], total, acc[m][p]);
        }
      }
    }
  }
  HR_EACH f_store(sums + m * stride + p * HR_PANEL, acc[m][p]);
#undef HR_EACH
}

template <class Q>
constexpr int kTileRows = Q::mode == kSub ? 3 : 6;

// The rows of a tile, or those of the last that are `left`.
template <class Q>
HR_INLINE void tile_sums(const DecodedUnit<Q>* room, int units, const HrQuantised& x, int64_t row,
                         int left, bool going, float* sums, int64_t stride) {
  constexpr int most = kTileRows<Q>;
  const HrLane* lanes = x.six[row / HR_SIX * x.stride].lanes + row % HR_SIX;
  switch (left) {
    case 1: return pair_rows<Q, 1>(room, units, lanes, going, sums, stride);
    case 2: return pair_rows<Q, 2>(room, units, lanes, going, sums, stride);
    case 3: return pair_rows<Q, 3>(room, units, lanes, going, sums, stride);
    case 4: return pair_rows<Q, most < 4 ? 3 : 4>(room, units, lanes, going, sums, stride);
    case 5: return pair_rows<Q, most < 4 ? 3 : 5>(room, units, lanes, going, sums, stride);
    default: return pair_rows<Q, most>(room, units, lanes, going, sums, stride);
  }
}

// The blocks of a pair that are decoded next: from memory their lines come late, unless they are
// asked for while the rows pass over this one.
struct Coming {
  Panel side[2];
  int64_t bytes, low_bytes;  // of a side
};

// Part i of n of the lines.
HR_INLINE void ask_part(const Coming& next, int i, int n) {
  for (const Panel& side : next.side) {
    for (int64_t at = next.bytes * i / n & -64; at < next.bytes * (i + 1) / n; at += 64)
      prefetch_l2(side.data + at);
    for (int64_t at = next.low_bytes * i / n & -64; at < next.low_bytes * (i + 1) / n; at += 64)
      prefetch_l2(side.low + at);
  }
}

// Units [from, from + units) of the panels `panel` and, where there is one, `panel` + 1.
template <class Q>
HR_INLINE Coming blocks_of(const HrPart& part, int64_t panel, int64_t panels, int from, int units) {
  constexpr hr::Format f = Q::format;
  Coming of{{}, static_cast<int64_t>(units / f.units()) * f.block_bytes(),
            static_cast<int64_t>(units) * f.low_bytes};
  for (int side = 0; side < 2; ++side) {
    Panel& data = of.side[side] = panel_of<Q>(part, panel + side < panels ? panel + side : panel);
    data.data += static_cast<int64_t>(from / f.units()) * f.block_bytes();
    data.low += static_cast<int64_t>(from) * f.low_bytes;
  }
  return of;
}

// `rows` rows from the first lane of a block on by `panels` panels, kGroup at most:
// sums[rows][stride]. Of an odd number the last panel is its own neighbour.
template <class Q>
void paired_sums(const HrQuantised& x, const HrPart& part, int64_t panel, int panels, int64_t row,
                 int rows, float* sums, int64_t stride) {
  constexpr int most = kTileRows<Q>;
  const int64_t last = panel + panels, all_panels = hr::panel_count(part.out);
  const int all = part.in / HR_UNIT_K, tiles = (rows + most - 1) / most;
  DecodedUnit<Q> room[kBlockUnits];
  for (int from = 0; from < all; from += kBlockUnits) {
    const int units = all - from < kBlockUnits ? all - from : kBlockUnits;
    for (int64_t p = panel; p < last; p += 2) {
      const Coming now = blocks_of<Q>(part, p, last, from, units);
      for (int side = 0; side < 2; ++side) decode_side<Q>(now.side[side], units, side, room);
      Coming next = now;  // asked for in vain where nothing follows
      const int then = from + units, left = all - then < kBlockUnits ? all - then : kBlockUnits;
      if (p + 2 < last) next = blocks_of<Q>(part, p + 2, last, from, units);
      else if (left > 0) next = blocks_of<Q>(part, panel, last, then, left);
      else if (last < all_panels)
        next = blocks_of<Q>(part, last, all_panels, 0, all < kBlockUnits ? all : kBlockUnits);
      float* to = sums + (p - panel) * HR_PANEL;
      const bool going = from > 0;
      for (int i = 0; i < tiles; ++i, to += most * stride) {
        const int first = i * most;
        ask_part(next, i, tiles);
        tile_sums<Q>(room, units, HrQuantised{x.six + from, x.stride}, row + first, rows - first, going, to,
                     stride);
      }
    }
  }
}

}  // namespace

#endif

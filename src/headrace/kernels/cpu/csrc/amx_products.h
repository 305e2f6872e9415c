// Rows by panels through tiles: sixteen rows and more of quantised products, on CPUs with AMX.
//
// The arithmetic. Per unit (16 outputs × 32 of K) and sixteen rows there is one TDPBSSD on tiles
// of 16 × 32 and 8 × 64 bytes. Intel publishes 16 cycles for a full one (K = 64), which is taken
// here for these half ones too; A's tile is a load of 16 lines, B's of 8, the sums' a store of 16.
// The vector units then take, for each row, one int → float, one multiply and one fma (with
// minima one fma more; with two groups a unit one more of each but the multiply), all of them on
// the two ports for 512 bits.
//
//   cycles per unit and 16 rows        tile   stores   loads   vectors   the VNNI kernel
//   Q4_0, Q5_0, Q8_0, MXFP4, INT8        16       16      20        24        88
//   Q4_1, Q5_1, Q4_K, Q5_K, INT4         16       16      20        32        96
//   Q6_K                                 32       32      28        40       104
//
// (Lines of 64 bytes, two loads and one store a cycle. VNNI: eight vpdpbusd a row on the same two
// ports instead of the tile.) So the groups' scaling is the limit, not the tiles: 24 cycles for
// 16,384 operations, a third of the 2,048 a cycle that Intel publishes for a core; activations with
// a scale per 64 would make it two thirds. Of the VNNI kernel's cycles it is 27 to 38 %.
//
// Beside it: decoding a panel once per call, about 24 vector operations and 10 stores a unit: 12
// cycles, half of what sixteen rows take and a sixtieth of what five hundred take. And bringing the
// rows of a pass together, because tiles want one stride where activations lie by six: 10 lines
// read and written a unit, for all panels of a group. So sixteen rows cost 24 + 12 + 2 cycles or so
// where VNNI takes 88 and decodes twice; the two would meet near seven rows. Fewer than sixteen go
// to the VNNI kernel all the same: there the weights' bytes are the limit.
//
// These are counts. Measured (ADR 0381), sixteen rows took 1.5 times the VNNI kernel's time: the way
// of a unit's sums through memory is not hidden. So the level serves by name only.
//
// The codes become signed (code − zero) when they are decoded, so that the int32 sums are those of
// the other levels without a start value, and scaling goes in the order of panel.h: equal bits.
#pragma once
#include "amx.h"
#include "gate_up.h"

namespace {

struct TileUnit {  // one unit of a panel, decoded
  int8_t codes[8][64];
  float scale[HR_PANEL];
  float second[HR_PANEL];  // kMin: the minimum; kSub: the scale of the second half
};

struct TileRows {  // one unit of sixteen rows of activations
  int8_t codes[kTileRows][HR_UNIT_K];
  float scale[kTileRows];
  float sum[kTileRows];
};

static_assert(sizeof(TileUnit) % 64 == 0 && sizeof(TileRows) % 64 == 0, "lines");

template <class Q>
__attribute__((noinline)) void decode_panel(Panel panel, int blocks, TileUnit* out) {
  constexpr hr::Format f = Q::format;
  const uint8_t *block = panel.data, *low = panel.low;
  for (int b = 0; b < blocks; ++b, block += f.block_bytes()) {
    for (int u = 0; u < f.units(); ++u, ++out, low += f.low_bytes) {
      const uint8_t* unit = block + f.header + u * f.unit_bytes();
      const uint8_t* q = unit + f.unit_extra;
#define HR_BODY(S)                                                                   \
  {                                                                                  \
    __m512i code = code_of<Q, S, true>(q, low).v;                                    \
    if constexpr (Q::mode != kMin)                                                   \
      code = _mm512_sub_epi8(code, c_set(static_cast<uint8_t>(Q::zero)).v);          \
    _mm512_store_si512(out->codes[S], code);                                         \
  }
      HR_STEPS8(HR_BODY);
#undef HR_BODY
      F d = Q::scale(block, unit);
      if constexpr (Q::mode == kSub) {
        f_store(out->scale, f_mul(d, f_from_i(i_s8(reinterpret_cast<const int8_t*>(unit)))));
        f_store(out->second, f_mul(d, f_from_i(i_s8(reinterpret_cast<const int8_t*>(unit + 16)))));
      } else {
        f_store(out->scale, d);
        if constexpr (Q::mode == kMin) f_store(out->second, Q::min(block, unit));
      }
    }
  }
}

// Rows [row, row + m) of `units` units, rows beyond m as zeros.
inline void gather_rows(const HrQuantised& x, int64_t row, int m, int units, TileRows* out) {
  for (int i = 0; i < kTileRows; ++i) {
    if (i >= m) {
      for (int u = 0; u < units; ++u) {
        memset(out[u].codes[i], 0, HR_UNIT_K);
        out[u].scale[i] = out[u].sum[i] = 0;
      }
      continue;
    }
    const HrSix* six = x.six + (row + i) / HR_SIX * x.stride;
    const int lane = static_cast<int>((row + i) % HR_SIX);
    for (int u = 0; u < units; ++u) {
      const HrLane& from = six[u].lanes[lane];
      memcpy(out[u].codes[i], from.codes, HR_UNIT_K);
      out[u].scale[i] = from.unit.scale;
      out[u].sum[i] = from.unit.sum;
    }
  }
}

// The integer sums of one unit, of both its halves where they have scales of their own. Units
// alternate between two sets of tiles (kTurn), so that one is stored while the next is computed.
using TileSums = int32_t[2][kTileRows][HR_PANEL];

template <Mode kMode, int kTurn>
HR_INLINE void tile_unit(const TileUnit& w, const TileRows& x, TileSums& sums) {
  if constexpr (kMode == kSub) {
    tile_zero<0>();
    tile_load<6>(x.codes, HR_UNIT_K);
    tile_load<7>(w.codes, 64);
    tile_dot<0, 6, 7>();
    tile_store<0>(sums[0], 64);
    tile_zero<1>();
    tile_load<6>(&x.codes[0][16], HR_UNIT_K);
    tile_load<7>(w.codes[4], 64);
    tile_dot<1, 6, 7>();
    tile_store<1>(sums[1], 64);
  } else {
    tile_zero<kTurn>();
    tile_load<2 + kTurn>(x.codes, HR_UNIT_K);
    tile_load<4 + kTurn>(w.codes, 64);
    tile_dot<kTurn, 2 + kTurn, 4 + kTurn>();
    tile_store<kTurn>(sums[0], 64);
  }
}

// The float operations of panel.h's panel_rows, in its order.
template <Mode kMode>
HR_INLINE void scale_unit(const TileUnit& w, const TileRows& x, const TileSums& sums, F* acc) {
  F first = f_load(w.scale), second = f_load(w.second);
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) {
    F sum = f_from_i(i_load(sums[0][m])), scale = f_set(x.scale[m]);
    if constexpr (kMode == kSub) {
      F both = f_fma(second, f_from_i(i_load(sums[1][m])), f_mul(first, sum));
      acc[m] = f_fma(both, scale, acc[m]);
    } else {
      acc[m] = f_fma(sum, f_mul(first, scale), acc[m]);
      if constexpr (kMode == kMin) acc[m] = f_fma(second, f_set(x.sum[m]), acc[m]);
    }
  }
}

// Sixteen rows by one decoded panel; sums[m · stride + lane].
template <Mode kMode>
__attribute__((noinline)) void tile_panel(const TileUnit* w, const TileRows* x, int units,
                                          float* sums, int64_t stride) {
  alignas(64) TileSums even, odd;
  F acc[kTileRows];
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) acc[m] = f_zero();
  int u = 0;
  for (; u + 2 <= units; u += 2) {
    tile_unit<kMode, 0>(w[u], x[u], even);
    tile_unit<kMode, 1>(w[u + 1], x[u + 1], odd);
    scale_unit<kMode>(w[u], x[u], even, acc);
    scale_unit<kMode>(w[u + 1], x[u + 1], odd, acc);
  }
  if (u < units) {
    tile_unit<kMode, 0>(w[u], x[u], even);
    scale_unit<kMode>(w[u], x[u], even, acc);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kTileRows; ++m) f_store(sums + m * stride, acc[m]);
}

// The work space of a thread: decoded panels, then the rows of one pass.
HR_INLINE TileRows* rows_behind(TileUnit* decoded, int panels, int units) {
  return reinterpret_cast<TileRows*>(decoded + static_cast<int64_t>(panels) * units);
}

inline int64_t tile_scratch(int panels, int64_t in) {
  return in / HR_UNIT_K *
         (panels * static_cast<int64_t>(sizeof(TileUnit)) + static_cast<int64_t>(sizeof(TileRows)));
}

template <class Q>
void tiled_panels(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first,
                  int64_t last, uint8_t* scratch) {
  constexpr hr::Format f = Q::format;
  const int blocks = part.in / f.span, units = part.in / HR_UNIT_K;
  auto* decoded = reinterpret_cast<TileUnit*>(scratch);
  alignas(64) float sums[kTileRows * HR_PANEL];
  for (int64_t panel = first; panel < last; panel += kGroup) {
    const int count = static_cast<int>(last - panel < kGroup ? last - panel : kGroup);
    TileRows* x = rows_behind(decoded, count, units);
    for (int p = 0; p < count; ++p)
      decode_panel<Q>(panel_of<Q>(part, panel + p), blocks, decoded + p * units);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int m = static_cast<int>(rows - row < kTileRows ? rows - row : kTileRows);
      gather_rows(op.x, row, m, units, x);
      for (int p = 0; p < count; ++p) {
        tile_panel<Q::mode>(decoded + p * units, x, units, sums, HR_PANEL);
        for (int i = 0; i < m; ++i)
          finish(target_of(part, row + i, panel + p), f_load(sums + i * HR_PANEL));
      }
    }
  }
}

#define HR_QUANTISED_KINDS(DO) \
  DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q4_K) DO(Q5_K) DO(Q6_K) DO(MXFP4) \
  DO(INT4) DO(INT8)

void tiled_part(const HrLinear& op, const HrPart& part, int64_t rows, int64_t first, int64_t last,
                uint8_t* scratch) {
#define HR_KIND(Q) \
  case HR_##Q: return tiled_panels<Q>(op, part, rows, first, last, scratch);
  switch (part.kind) {
    HR_QUANTISED_KINDS(HR_KIND) HR_KIND(Q8_0_PLANES)
    case HR_F32: return dense_panels<HR_F32>(op, part, rows, first, last);
    case HR_F16: return dense_panels<HR_F16>(op, part, rows, first, last);
    case HR_BF16: return dense_panels<HR_BF16>(op, part, rows, first, last);
    case HR_E4M3: return dense_panels<HR_E4M3>(op, part, rows, first, last);
  }
#undef HR_KIND
}

void tiled_linear(const HrLinear& op, int64_t rows, const hr::Work& work) {
  tiles_begin(kTileConfig);
  each_run(op, rows, work, [&](const HrPart& part, int64_t first, int64_t last) {
    tiled_part(op, part, rows, first, last, work.scratch);
  });
  tiles_end();
}

int64_t scratch_of_linear(const HrLinear& op) {
  int64_t most = 0;
  for (int32_t i = 0; i < op.count; ++i) {
    const HrPart& part = op.parts[i];
    if (!hr::format_of(part.kind)) continue;
    const int64_t run = run_of(part, kTileRows, 1);
    const int64_t need = tile_scratch(static_cast<int>(run), part.in);
    if (need > most) most = need;
  }
  return most;
}

// Two panels of one unit of 32 outputs.
void decode_pair(const HrPart& part, int64_t unit, TileUnit* out) {
  const int units = part.in / HR_UNIT_K;
#define HR_KIND(Q)                                                                          \
  case HR_##Q: {                                                                            \
    const int blocks = part.in / Q::format.span;                                            \
    for (int p = 0; p < 2; ++p)                                                             \
      decode_panel<Q>(panel_of<Q>(part, 2 * unit + p), blocks, out + p * units);            \
    return;                                                                                 \
  }
  switch (part.kind) { HR_QUANTISED_KINDS(HR_KIND) }
#undef HR_KIND
}

// sums[32 · i + 16 · p + lane]
void pair_sums(const HrPart& part, const TileUnit* w, const TileRows* x, float* sums) {
  const int units = part.in / HR_UNIT_K;
#define HR_KIND(Q)                                                                          \
  case HR_##Q:                                                                              \
    for (int p = 0; p < 2; ++p)                                                             \
      tile_panel<Q::mode>(w + p * units, x, units, sums + p * HR_PANEL, 2 * HR_PANEL);      \
    return;
  switch (part.kind) { HR_QUANTISED_KINDS(HR_KIND) }
#undef HR_KIND
}

void tiled_gate_up(const HrGateUp& op, int64_t rows, const hr::Work& work) {
  const int units = op.gate.in / HR_UNIT_K;
  auto* decoded = reinterpret_cast<TileUnit*>(work.scratch);
  TileRows* x = rows_behind(decoded, 4, units);
  alignas(64) float gate[2 * HR_PANEL * kTileRows], up[2 * HR_PANEL * kTileRows];
  tiles_begin(kTileConfig);
  int victim = 0;
  int64_t unit;
  while (work.next_in_line(op.gate.out / 32, &victim, &unit)) {
    decode_pair(op.gate, unit, decoded);
    decode_pair(op.up, unit, decoded + 2 * units);
    for (int64_t row = 0; row < rows; row += kTileRows) {
      const int m = static_cast<int>(rows - row < kTileRows ? rows - row : kTileRows);
      gather_rows(op.x, row, m, units, x);
      pair_sums(op.gate, decoded, x, gate);
      pair_sums(op.up, decoded + 2 * units, x, up);
      switch (op.activation) {
        case HR_SILU: gate_rows<HR_SILU>(op, row, m, unit, gate, up); break;
        case HR_GELU_TANH: gate_rows<HR_GELU_TANH>(op, row, m, unit, gate, up); break;
        default: gate_rows<HR_GELU>(op, row, m, unit, gate, up); break;
      }
    }
  }
  tiles_end();
}

#undef HR_QUANTISED_KINDS

}  // namespace

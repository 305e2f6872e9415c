// Dense panels of bf16 through tiles, on CPUs with AMX: activations as the sum of two bf16 numbers.
//
// The arithmetic. TDPBF16PS multiplies 16 rows × 32 of K by 32 of K × 16 outputs and adds to fp32
// sums: 8,192 multiply-adds in 16 cycles, sixteen times what two ports of fp32 fma do.
// Weights are bf16 as they are. An activation is high + low, each rounded to bf16: two products
// instead of one, and what is left out is 2^-17 of it; one that is rounded once leaves out 2^-9 and
// takes one product (kPieces, by the level that was asked for: amx, amx-bf16).
// Two tiles of rows by two panels are eight products (132 cycles) for six loads of a tile (some 50).
//
// Memory. Up to sixteen rows are bound by it: a panel is put into pairs as it comes, two blocks
// before its products, so that these hide behind the lines on their way. (A chunk put into pairs,
// then multiplied, then the next: three quarters of that.) More rows than sixteen: kPanels panels are
// put into pairs for kPart blocks of K and stay in L2 with the sums of kMost rows, which are
// cut into pieces by thirty-two and read by all of these panels: a tenth of the work.
//
// Bits. A row's sums are the instruction's, over K in its order, high before low for each 32 of K:
// they depend neither on the number of rows (tiles have as many as there are, up to sixteen) nor on
// panels beside, as everywhere here. But they are not those of a chain of fp32 (dense.h), so that
// this level serves by name only and is in an engine's identity (base/identity.py). An infinite
// activation has no low piece: its row is no number.
#pragma once
#include "amx.h"
#include "named.h"

namespace {

constexpr int64_t kBlockBytes = kBlockK * HR_PANEL * 2;
constexpr int kPart = 32;       // blocks of K whose sums are taken at a time
constexpr int kPanels = 16;     // panels that share a row's pieces
constexpr int64_t kMost = 256;  // rows that share what was put into pairs

struct RowPieces {  // a block of K of sixteen rows
  uint16_t high[kTileRows][kBlockK], low[kTileRows][kBlockK];
};

struct PanelPairs {  // a block of K of a panel: k and k + 1 of an output side by side
  uint16_t pairs[kBlockK / 2][2 * HR_PANEL];
};

static_assert(sizeof(RowPieces) == 2048 && sizeof(PanelPairs) == 1024, "whole tiles");

HR_INLINE __m512 widened(__m256i bf16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16), 16));
}

// m rows of `blocks` blocks of K from x on; rows from m to `wide` as zeros.
template <int kPieces>
void cut_rows(const float* x, int64_t stride, int m, int wide, int64_t blocks, RowPieces* out) {
  for (int i = 0; i < m; ++i, x += stride) {
    for (int64_t b = 0; b < blocks; ++b) {
      const __m512 first = _mm512_loadu_ps(x + b * kBlockK);
      const __m512 second = _mm512_loadu_ps(x + b * kBlockK + 16);
      const __m512i high = (__m512i)_mm512_cvtne2ps_pbh(second, first);
      _mm512_store_si512(out[b].high[i], high);
      if constexpr (kPieces == 1) continue;
      const __m512 rest = _mm512_sub_ps(first, widened(_mm512_castsi512_si256(high)));
      const __m512 more = _mm512_sub_ps(second, widened(_mm512_extracti64x4_epi64(high, 1)));
      _mm512_store_si512(out[b].low[i], (__m512i)_mm512_cvtne2ps_pbh(more, rest));
    }
  }
  for (int i = m; i < wide; ++i)
    for (int64_t b = 0; b < blocks; ++b) {
      _mm512_store_si512(out[b].high[i], _mm512_setzero_si512());
      _mm512_store_si512(out[b].low[i], _mm512_setzero_si512());
    }
}

// A block of K of a panel [k][16]; the lines `early` bytes further are asked for.
HR_INLINE void pair_block(const uint8_t* panel, int64_t early, PanelPairs* out) {
  const __m512i turns = _mm512_load_si512(kTurns);
#pragma GCC unroll 16
  for (int k = 0; k < kBlockK / 2; ++k, panel += 64) {
    prefetch_l2(panel + early);
    _mm512_store_si512(out->pairs[k],
                       _mm512_permutexvar_epi16(turns, _mm512_loadu_si512(panel)));
  }
}

// R tiles of rows, `a_next` blocks apart, by P panels, `b_next` blocks apart; sums of 16 × 16, at c
// (R rows of them, `c_next` apart), go on unless this is the `first` part of K.
template <int kPieces, int R, int P>
__attribute__((noinline)) void tiles_sums(const RowPieces* a, int64_t a_next, const PanelPairs* b,
                                          int64_t b_next, int64_t blocks, bool first, float* c,
                                          int64_t c_next) {
  constexpr int64_t kTile = kTileRows * HR_PANEL;
  if (first) {
    tile_zero<0>();
    if constexpr (P == 2) tile_zero<1>();
    if constexpr (R == 2) tile_zero<2>();
    if constexpr (R == 2 && P == 2) tile_zero<3>();
  } else {
    tile_load<0>(c, 64);
    if constexpr (P == 2) tile_load<1>(c + kTile, 64);
    if constexpr (R == 2) tile_load<2>(c + c_next, 64);
    if constexpr (R == 2 && P == 2) tile_load<3>(c + c_next + kTile, 64);
  }
  for (int64_t i = 0; i < blocks; ++i) {
    tile_load<6>(b[i].pairs, 64);
    if constexpr (P == 2) tile_load<7>(b[b_next + i].pairs, 64);
#define HR_PIECE(piece)                                            \
  tile_load<4>(a[i].piece, 64);                                    \
  if constexpr (R == 2) tile_load<5>(a[a_next + i].piece, 64);     \
  tile_dot_bf16<0, 4, 6>();                                        \
  if constexpr (P == 2) tile_dot_bf16<1, 4, 7>();                  \
  if constexpr (R == 2) tile_dot_bf16<2, 5, 6>();                  \
  if constexpr (R == 2 && P == 2) tile_dot_bf16<3, 5, 7>();
    HR_PIECE(high)
    if constexpr (kPieces == 2) {
      HR_PIECE(low)
    }
#undef HR_PIECE
  }
  tile_store<0>(c, 64);
  if constexpr (P == 2) tile_store<1>(c + kTile, 64);
  if constexpr (R == 2) tile_store<2>(c + c_next, 64);
  if constexpr (R == 2 && P == 2) tile_store<3>(c + c_next + kTile, 64);
}

// The work space of a thread. For up to sixteen rows: their pieces, all of K.
struct TileRoom {
  PanelPairs pairs[kPanels * kPart];
  float sums[kMost / kTileRows][kPanels][kTileRows * HR_PANEL];
  RowPieces pieces[2 * kPart];  // and more of them
};

HR_INLINE int64_t tile_room(int64_t in) {
  const int64_t more = in / kBlockK - 2 * kPart;
  return static_cast<int64_t>(sizeof(TileRoom)) +
         (more > 0 ? more : 0) * static_cast<int64_t>(sizeof(RowPieces));
}

// Up to sixteen rows, whose pieces are `a`, by P panels from `panel` on.
template <int kPieces, int P>
__attribute__((noinline)) void tiled_few(const HrPart& part, int64_t rows, int64_t panel,
                                         const RowPieces* a) {
  constexpr int kRing = 4;
  alignas(64) PanelPairs ring[kRing][P];
  alignas(64) float sums[P][kTileRows * HR_PANEL];
  const int64_t bytes = hr::panel_bytes(HR_BF16, part.in), blocks = part.in / kBlockK;
  const uint8_t* w = part.data + panel * bytes;
  const auto pair = [&](int64_t b) __attribute__((always_inline)) {
    if (b >= blocks) return;
    // At its end a stream goes on with its next panel, P further.
    const bool ends = (blocks - b) * kBlockBytes <= kEarly;
    const int64_t early = ends ? kEarly + (P - 1) * bytes : kEarly;
    for (int p = 0; p < P; ++p)
      pair_block(w + p * bytes + b * kBlockBytes, early, &ring[b % kRing][p]);
  };
  tile_zero<0>();
  if constexpr (P == 2) tile_zero<1>();
  pair(0);
  pair(1);
  for (int64_t b = 0; b < blocks; ++b) {
    pair(b + 2);
    const PanelPairs* pairs = ring[b % kRing];
    tile_load<6>(pairs[0].pairs, 64);
    if constexpr (P == 2) tile_load<7>(pairs[1].pairs, 64);
    tile_load<4>(a[b].high, 64);
    if constexpr (kPieces == 2) tile_load<5>(a[b].low, 64);
    tile_dot_bf16<0, 4, 6>();
    if constexpr (P == 2) tile_dot_bf16<1, 4, 7>();
    if constexpr (kPieces == 2) tile_dot_bf16<0, 5, 6>();
    if constexpr (kPieces == 2 && P == 2) tile_dot_bf16<1, 5, 7>();
  }
  tile_store<0>(sums[0], 64);
  if constexpr (P == 2) tile_store<1>(sums[1], 64);
  for (int64_t i = 0; i < rows; ++i)
    for (int p = 0; p < P; ++p)
      finish(target_of(part, i, panel + p), f_load(sums[p] + i * HR_PANEL));
}

// kPanels panels at most for any number of rows.
template <int kPieces>
void tiled_many(const HrLinear& op, const HrPart& part, int64_t rows, int64_t panel, int count,
                TileRoom* room) {
  const int64_t bytes = hr::panel_bytes(HR_BF16, part.in), blocks = part.in / kBlockK;
  for (int64_t row = 0; row < rows; row += kMost) {
    const int64_t block = rows - row < kMost ? rows - row : kMost;
    for (int64_t b = 0; b < blocks; b += kPart) {
      const int64_t n = blocks - b < kPart ? blocks - b : kPart;
      for (int p = 0; p < count; ++p)
        for (int64_t i = 0; i < n; ++i)
          pair_block(part.data + (panel + p) * bytes + (b + i) * kBlockBytes, kEarly,
                     room->pairs + p * kPart + i);
      for (int64_t i = 0; i < block; i += 2 * kTileRows) {
        const int tiles = block - i > kTileRows ? 2 : 1;
        for (int t = 0; t < tiles; ++t) {
          const int64_t from = i + t * kTileRows, left = block - from;
          cut_rows<kPieces>(op.dense + (row + from) * op.dense_stride + b * kBlockK,
                            op.dense_stride, static_cast<int>(left < kTileRows ? left : kTileRows),
                            kTileRows, n, room->pieces + t * kPart);
        }
        for (int p = 0; p < count; p += 2) {
          float* sums = room->sums[i / kTileRows][p];
          const PanelPairs* pairs = room->pairs + p * kPart;
          constexpr int64_t next = sizeof(room->sums[0]) / sizeof(float);
#define HR_CASE(R, P)                                                                        \
  if (tiles == R && (count - p < 2 ? 1 : 2) == P)                                            \
    tiles_sums<kPieces, R, P>(room->pieces, kPart, pairs, kPart, n, b == 0, sums, next);
          HR_CASE(1, 1) HR_CASE(1, 2) HR_CASE(2, 1) HR_CASE(2, 2)
#undef HR_CASE
        }
      }
    }
    for (int64_t i = 0; i < block; ++i)
      for (int p = 0; p < count; ++p)
        finish(target_of(part, row + i, panel + p),
               f_load(room->sums[i / kTileRows][p] + i % kTileRows * HR_PANEL));
  }
}

// As many rows as there are, up to sixteen, in the tiles of rows and of sums.
HR_INLINE TileConfig tiles_for(int64_t rows) {
  TileConfig config = kTileConfig;
  for (int tile = 0; tile < 6; ++tile)
    config.rows[tile] = static_cast<uint8_t>(rows < kTileRows ? rows : kTileRows);
  return config;
}

// Pairs of panels; for many rows as many as share their pieces, and three runs for each thread.
inline int64_t tiled_run(const HrPart& part, int64_t rows, int threads) {
  if (!in_blocks(part)) return run_of(part, rows, threads);
  if (rows <= kTileRows) return 2 + run_of(part, rows, threads) / 2 * 2;
  const int64_t fair = hr::panel_count(part.out) / (3 * threads) / 2 * 2;
  return fair < 2 ? 2 : fair < kPanels ? fair : kPanels;
}

template <int kPieces>
void tiled_linear(const HrLinear& op, const hr::Work& work) {
  const int64_t rows = work.rows(op.rows);
  if (rows == 0) return;
  auto* room = reinterpret_cast<TileRoom*>(work.scratch);
  tiles_begin(tiles_for(rows));
  if (rows <= kTileRows) {
    cut_rows<kPieces>(op.dense, op.dense_stride, static_cast<int>(rows), static_cast<int>(rows),
                      width_in_blocks(op) / kBlockK, room->pieces);
  }
  const auto body = [&](const HrPart& part, int64_t first, int64_t last) {
    if (!in_blocks(part)) return part_panels(op, part, rows, first, last);
    const int count = static_cast<int>(last - first);
    if (rows > kTileRows) return tiled_many<kPieces>(op, part, rows, first, count, room);
    for (; first + 2 <= last; first += 2) tiled_few<kPieces, 2>(part, rows, first, room->pieces);
    if (first < last) tiled_few<kPieces, 1>(part, rows, first, room->pieces);
  };
  each_run(op, rows, work, body, tiled_run);
  tiles_end();
}

template <int kPieces>
struct Tiled {
  static void linear(const HrLinear& op, const hr::Work& work) { tiled_linear<kPieces>(op, work); }
  static int64_t room(int64_t in) { return tile_room(in); }
};

}  // namespace

"""Grouped products of few rows with packed experts: the loop of `product_packed_skinny` by address.

Arithmetic as there: 2.3 to 5.9 instructions a weight, where `product_packed`'s loop has 6.9 to 11.5
and 3.3 to 6.6 fit while the bytes arrive. A tile is 8 or 16 rows of one expert; where an expert has
more, its weights come from L2 again. The gate is taken into the product before it. If the experts
of a step are too few for the device, the input is split. The last program of a tile to finish then
adds the parts in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .gated import activate
from .moe_tiles import ExpertTable, Tiles, matrix_at, tile_rows
from .packed import packing_of
from .product_packed_skinny import PackedSkinnyConfig, sum_groups
from .split import count_splits, join_parts
from .unpack import unpack_step


@triton.jit(do_not_specialize=["per_split"])
def _few_kernel(
    x,
    code_addresses,
    pair_addresses,
    factor_addresses,
    listed,
    tile_expert,
    y,
    partial,
    tickets,
    width,
    outs,
    chunks,
    x_stride,
    per_split,
    SHARED: tl.constexpr,
    SINGLE: tl.constexpr,
    PACKING: tl.constexpr,
    GATE: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute y[a] = x[a // SHARED] · weight[expert of a]ᵀ for the assignments `a` of this tile.

    GATE: the activation, or "": the weight is gate over up, with `outs` outputs each. SPLIT: the
    grid's last axis are parts of the input.
    """
    STEP: tl.constexpr = unpack_step(PACKING)
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    assignment, real, row = tile_rows(listed, tile, ROWS, SINGLE, SHARED)
    stride = outs * 2 if GATE != "" else outs
    split = tl.program_id(2)
    first = split * per_split
    last = tl.minimum(first + per_split, chunks)
    codes = matrix_at(code_addresses, expert, tl.uint8)
    pairs = matrix_at(pair_addresses, expert, tl.int32)
    factors = tl.load(factor_addresses + expert).to(tl.pointer_type(tl.float32))
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    # The last output again rather than a mask: it is not stored.
    held = tl.minimum(out, outs - 1)
    place = tl.arange(0, STEP)
    total, other = sum_groups(
        x + row[None, :] * x_stride + place[:, None] + first * 128,
        real,
        codes + (first.to(tl.int64) * stride + held)[:, None] * PACKING.bytes,
        pairs + first.to(tl.int64) * PACKING.planes * stride + held,
        first,
        last,
        width,
        stride,
        outs,
        PACKING,
        GATE,
        EVEN,
        ROWS,
        OUTS,
        STAGES,
    )
    last_part = True
    if SPLIT:
        cells = tl.num_programs(0) * tl.num_programs(1)
        total, other, last_part = join_parts(
            total,
            other,
            real,
            partial,
            tickets,
            tl.program_id(1) * tl.num_programs(0) + tile,
            cells,
            split,
            tl.num_programs(2),
            GATE,
            OUTS,
            ROWS,
        )
    if last_part:
        out_mask = out < outs
        total *= tl.load(factors + out, mask=out_mask, other=0.0)[:, None]
        if GATE != "":
            other *= tl.load(factors + outs + out, mask=out_mask, other=0.0)[:, None]
            total = activate(total, other, GATE)
        y_at = y + assignment[None, :] * outs + out[:, None]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=real[None, :] & out_mask[:, None])


def grouped_packed(
    x: torch.Tensor,
    table: ExpertTable,
    tiles: Tiles,
    shared: int,
    config: PackedSkinnyConfig,
    tickets: torch.Tensor | None,
    activation: str = "",
) -> torch.Tensor:
    """Multiply x [assignments / shared, in] → [assignments, out], or with an `activation`, for a
    table of gate over up [2 · I, in], act(gate) · up [assignments, I].

    `tickets`, see `split.make_tickets`: the input may be split, which is then part of the result's
    rounding. Tiles are of `config.rows` rows.
    """
    width = table.shape[1]
    outs = table.shape[0] // 2 if activation else table.shape[0]
    assert tiles.rows == config.rows
    assert table.packed is not None
    assert table.scales is not None
    assert x.stride(1) == 1
    chunks = -(-width // 128)
    # Sixteen rows of two sums each would not fit into the registers.
    each = config.outs // 2 if activation and config.rows > 8 else config.outs
    across = triton.cdiv(outs, each)
    splits = 1
    if tickets is not None:
        programs = config.programs // min(tiles.experts, tiles.assignments)
        splits = count_splits(programs, outs, each, chunks)
    per_split = triton.cdiv(chunks, splits)
    splits = triton.cdiv(chunks, per_split)
    y = torch.empty(tiles.assignments, outs, dtype=x.dtype, device=x.device)
    partial = y
    if splits > 1:
        assert tickets is not None
        assert tiles.count * across <= len(tickets)
        cell = (2 if activation else 1) * each * config.rows
        partial = torch.empty(
            splits * tiles.count * across * cell, dtype=torch.float32, device=x.device
        )
    _few_kernel[(tiles.count, across, splits)](
        x,
        table.data,
        table.scales,
        table.factors,
        tiles.listed,
        tiles.expert,
        y,
        partial,
        y if tickets is None else tickets,
        width,
        outs,
        chunks,
        x.stride(0),
        per_split,
        SHARED=shared,
        SINGLE=tiles.single,
        PACKING=packing_of(table.packed, x.dtype),
        GATE=activation,
        SPLIT=splits > 1,
        EVEN=width % 128 == 0,
        ROWS=config.rows,
        OUTS=each,
        STAGES=config.stages,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return y

"""Grouped products: each tile of rows by the matrix of its own expert, in any format.

Arithmetic as in `product_dense`, `product_packed` and `product_fp8`; only the operands are found
differently: rows through the list that `moe.place` made, matrices through tables of addresses,
since the experts of a layer need not lie in one tensor. All experts of one table are of one format,
granularity and shape; other tables are expanded to dense ones once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .gated import activate
from .moe_tiles import ExpertTable, Tiles, matrix_at, tile_rows
from .packed import packing_of
from .product_fp8 import BLOCK
from .product_packed import step_of, sum_chunks
from .quantise import code_product
from .support import matrix_product


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Cut of grouped products; `inner` is that of dense ones."""

    rows: int = 16
    outs: int = 64
    inner: int = 64
    warps: int = 4
    stages: int = 3
    whole: bool = False
    """Whether packed ones multiply 128 inputs at once, see `sum_chunks`."""


@triton.jit
def _dense_kernel(
    x,
    addresses,
    listed,
    tile_expert,
    y,
    width,
    outs,
    x_stride,
    SHARED: tl.constexpr,
    SINGLE: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Compute y[a] = x[a // SHARED] · weight[expert of a]ᵀ for the assignments `a` of this tile.

    GATE: the activation, or "": the weight is gate over up, with `outs` outputs each."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    assignment, real, row = tile_rows(listed, tile, ROWS, SINGLE, SHARED)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    inner = tl.arange(0, INNER)
    weight = matrix_at(addresses, expert, x.dtype.element_ty)
    x_at = x + row[:, None] * x_stride + inner[None, :]
    weight_at = weight + out.to(tl.int64)[None, :] * width + inner[:, None]
    up = outs.to(tl.int64) * width
    total = tl.zeros([ROWS, OUTS], tl.float32)
    other = tl.zeros([ROWS, OUTS], tl.float32)
    for at in range(0, width, INNER):
        there = inner < width - at
        weight_mask = (out < outs)[None, :] & there[:, None]
        a = tl.load(x_at, mask=real[:, None] & there[None, :], other=0.0)
        b = tl.load(weight_at, mask=weight_mask, other=0.0)
        total = matrix_product(a, b, total)
        if GATE != "":
            above = tl.load(weight_at + up, mask=weight_mask, other=0.0)
            other = matrix_product(a, above, other)
        x_at += INNER
        weight_at += INNER
    if GATE != "":
        total = activate(total, other, GATE)
    y_at = y + assignment[:, None] * outs + out[None, :]
    mask = real[:, None] & (out < outs)[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _packed_kernel(
    x,
    code_addresses,
    pair_addresses,
    factor_addresses,
    listed,
    tile_expert,
    y,
    width,
    outs,
    chunks,
    x_stride,
    SHARED: tl.constexpr,
    SINGLE: tl.constexpr,
    PACKING: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    STEP: tl.constexpr = step_of(PACKING)
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    assignment, real, row = tile_rows(listed, tile, ROWS, SINGLE, SHARED)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    held = tl.minimum(out, outs - 1)
    codes = matrix_at(code_addresses, expert, tl.uint8)
    pairs = matrix_at(pair_addresses, expert, tl.int32)
    factors = tl.load(factor_addresses + expert).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, 128 if WHOLE else STEP)
    total = sum_chunks(
        x + row[None, :] * x_stride + place[:, None],
        real,
        codes + held[:, None] * PACKING.bytes,
        pairs + held,
        0,
        chunks,
        width,
        outs,
        tl.zeros([OUTS, ROWS], tl.float32),
        PACKING,
        STEP,
        WHOLE,
        EVEN,
    )
    total *= tl.load(factors + held)[:, None]
    y_at = y + assignment[None, :] * outs + out[:, None]
    mask = real[None, :] & (out < outs)[:, None]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _fp8_kernel(
    x,
    x_scales,
    addresses,
    scale_addresses,
    listed,
    tile_expert,
    y,
    width,
    outs,
    groups,
    BLOCKED: tl.constexpr,
    SHARED: tl.constexpr,
    SINGLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Multiply codes by block or row. BLOCKED: OUTS divides 128."""
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    assignment, real, row = tile_rows(listed, tile, ROWS, SINGLE, SHARED)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    out_mask = out < outs
    inner = tl.arange(0, INNER)
    weight = matrix_at(addresses, expert, x.dtype.element_ty)
    scales = matrix_at(scale_addresses, expert, tl.float32)
    x_at = x + row[:, None] * width + inner[None, :]
    weight_at = weight + out.to(tl.int64)[None, :] * width + inner[:, None]
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for group in range(tl.cdiv(width, INNER)):
        there = inner < width - group * INNER
        a = tl.load(x_at, mask=real[:, None] & there[None, :], other=0.0)
        b = tl.load(weight_at, mask=out_mask[None, :] & there[:, None], other=0.0)
        if BLOCKED:
            row_scale = tl.load(x_scales + row * groups + group, mask=real, other=0.0)
            # All outputs of a tile lie in one block.
            row_scale *= tl.load(scales + tl.program_id(1) * OUTS // 128 * groups + group)
            total += code_product(a, b) * row_scale[:, None]
        elif ROWS < 64:
            total += code_product(a, b)
        else:
            total = matrix_product(a, b, total)
        x_at += INNER
        weight_at += INNER
    if not BLOCKED:
        total *= tl.load(x_scales + row, mask=real, other=0.0)[:, None]
        total *= tl.load(scales + out, mask=out_mask, other=0.0)[None, :]
    y_at = y + assignment[:, None] * outs + out[None, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=real[:, None] & out_mask[None, :])


def grouped_product(
    x: torch.Tensor,
    table: ExpertTable,
    tiles: Tiles,
    shared: int,
    config: MoeConfig,
    activation: str = "",
    *,
    dtype: torch.dtype | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply x [assignments / shared, in] → [assignments, out] in `dtype` (x's unless given). For
    a table of fp8 x are codes with `scales`.

    `activation`, of dense tables: gate over up [2 · I, in] → act(gate) · up [assignments, I].
    """
    outs, width = table.shape
    each = config.outs
    if activation:
        assert table.blocked is None
        assert table.packed is None
        outs, each = outs // 2, each // 2
    grid = (tiles.count, triton.cdiv(outs, each))
    listed, expert, assignments = tiles.listed, tiles.expert, tiles.assignments
    assert tiles.rows == config.rows
    cut = {
        "SHARED": shared,
        "SINGLE": tiles.single,
        "ROWS": config.rows,
        "OUTS": each,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    assert (scales is None) == (table.blocked is None), "codes are for codes"
    y = torch.empty(assignments, outs, dtype=dtype or x.dtype, device=x.device)
    if scales is not None:
        assert table.scales is not None
        _fp8_kernel[grid](
            x,
            scales,
            table.data,
            table.scales,
            listed,
            expert,
            y,
            width,
            outs,
            scales.shape[1],
            BLOCKED=table.blocked,
            INNER=BLOCK,
            **cut,
        )
    elif table.packed is not None:
        _packed_kernel[grid](
            x,
            table.data,
            table.scales,
            table.factors,
            listed,
            expert,
            y,
            width,
            outs,
            -(-width // 128),
            x.stride(0),
            PACKING=packing_of(table.packed, x.dtype),
            EVEN=width % 128 == 0,
            WHOLE=config.whole and x.dtype != torch.float32,
            **cut,
        )
    else:
        _dense_kernel[grid](
            x,
            table.data,
            listed,
            expert,
            y,
            width,
            outs,
            x.stride(0),
            INNER=config.inner,
            GATE=activation,
            **cut,
        )
    return y

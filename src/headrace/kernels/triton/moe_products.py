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
from .moe_tiles import ExpertTable, Tiles, tile_rows
from .packed import BYTES, planes_of
from .product_fp8 import BLOCK
from .product_packed import MAGIC, step_of, sum_chunks
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
    assignment = tile_rows(listed, tile, ROWS, SINGLE)
    real = assignment >= 0
    row = tl.where(real, assignment, 0) // SHARED
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    inner = tl.arange(0, INNER)
    weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
    # A fresh allocation is aligned; without this hint the compiler loads element by element.
    weight = tl.multiple_of(weight, 16)
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
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PLANES: tl.constexpr,
    MAGIC: tl.constexpr,
    EVEN: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
):
    STEP: tl.constexpr = step_of(BITS, GROUP)
    tile = tl.program_id(0)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    assignment = tile_rows(listed, tile, ROWS, SINGLE)
    real = assignment >= 0
    row = tl.where(real, assignment, 0) // SHARED
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    held = tl.minimum(out, outs - 1)
    codes = tl.load(code_addresses + expert).to(tl.pointer_type(tl.uint8))
    codes = tl.multiple_of(codes, 16)
    pairs = tl.load(pair_addresses + expert).to(tl.pointer_type(tl.int32))
    pairs = tl.multiple_of(pairs, 16)
    factors = tl.load(factor_addresses + expert).to(tl.pointer_type(tl.float32))
    place = tl.arange(0, 128 if WHOLE else STEP)
    total = sum_chunks(
        x + row[None, :] * x_stride + place[:, None],
        real,
        codes + held[:, None] * BYTES,
        pairs + held,
        0,
        chunks,
        width,
        outs,
        tl.zeros([OUTS, ROWS], tl.float32),
        BITS,
        BYTES,
        GROUP,
        ZERO,
        PLANES,
        MAGIC,
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
    assignment = tile_rows(listed, tile, ROWS, SINGLE)
    real = assignment >= 0
    row = tl.where(real, assignment, 0) // SHARED
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    out_mask = out < outs
    inner = tl.arange(0, INNER)
    weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
    weight = tl.multiple_of(weight, 16)
    scales = tl.load(scale_addresses + expert).to(tl.pointer_type(tl.float32))
    scales = tl.multiple_of(scales, 16)
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
        assert not table.bits
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
    elif table.bits:
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
            BITS=table.bits,
            BYTES=BYTES[table.bits],
            GROUP=table.group,
            ZERO=table.zero,
            PLANES=planes_of(table.group, table.zero),
            MAGIC=MAGIC[x.dtype],
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

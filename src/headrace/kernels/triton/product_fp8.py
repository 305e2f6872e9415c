"""Products of 8-bit floating point numbers: y = x · wᵀ with both in e4m3.

Arithmetic: half the bytes and twice the rate of bf16, so the ridge stays where it is (about 206
rows on an H200). The activations are quantised row by row on their way in: 2 bytes read and 1
written per element, about 1 / (out / 1,000) of the product's own bytes at few rows.

Scales. One per output row (a scale per tensor is repeated): they are applied at the end, and the
library (`library`) serves. One per block of 128 × 128 (DeepSeek-V3, 2024): activations get a scale
per 128 inputs, and each such part of the sum is scaled before it is added in fp32. Our own kernel
serves up to 256 rows, in the deterministic mode, and where the library has no such product. Its
tiles are walked and cut like those of `product_dense`: a row's bits do not depend on the others;
few rows split the input (`split`), and outputs come first (`quantise.code_product`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..weights import Fp8Weight, Weight
from .library import ScaledProducts
from .quantise import code_product, to_codes
from .split import FEW_ROWS, add_parts, count_splits
from .support import INTERPRET, matrix_product

BLOCK = 128
HIGH = 448.0
"""Largest number of e4m3."""


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Cut of a launch; the inner tile is `BLOCK`."""

    rows: int = 64
    outs: int = 128
    warps: int = 4
    stages: int = 3
    programs: int = 0
    """The input is split until there are about this many programs for few rows; part of the
    result's rounding."""


@triton.jit
def _quantise_kernel(
    x,
    codes,
    scales,
    width,
    x_stride,
    groups,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Quantise one group of one row; GROUP 0: the whole row, read twice, the second time from
    L2."""
    row = tl.program_id(0).to(tl.int64)
    if GROUP > 0:
        columns = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
        mask = columns < width
        values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(values), 0) / HIGH, 1e-30)
        coded = to_codes(values / scale, codes.dtype.element_ty, HIGH)
        tl.store(codes + row * width + columns, coded, mask=mask)
        tl.store(scales + row * groups + tl.program_id(1), scale)
    else:
        peak = 0.0
        for at in range(0, width, TILE):
            columns = at + tl.arange(0, TILE)
            values = tl.load(x + row * x_stride + columns, mask=columns < width, other=0.0)
            peak = tl.maximum(peak, tl.max(tl.abs(values.to(tl.float32)), 0))
        scale = tl.maximum(peak / HIGH, 1e-30)
        tl.store(scales + row, scale)
        for at in range(0, width, TILE):
            columns = at + tl.arange(0, TILE)
            mask = columns < width
            values = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
            coded = to_codes(values / scale, codes.dtype.element_ty, HIGH)
            tl.store(codes + row * width + columns, coded, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    x_scales,
    weight,
    scales,
    bias,
    y,
    rows,
    width,
    outs,
    groups,
    y_stride,
    per_split,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCKED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INNER: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Multiply codes by row or block. BLOCKED: OUTS divides 128."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, ROWS)
    per_group = GROUPED * tl.cdiv(outs, OUTS)
    first = program // per_group * GROUPED
    size = tl.minimum(row_tiles - first, GROUPED)
    row = (first + (program % per_group) % size) * ROWS + tl.arange(0, ROWS)
    first_out = (program % per_group) // size * OUTS
    # Either one part, of many programs, or all of them in order.
    split = tl.program_id(1)
    out = first_out + tl.arange(0, OUTS)
    inner = tl.arange(0, INNER)
    x_at = x + row.to(tl.int64)[:, None] * width + inner[None, :]
    weight_at = weight + out.to(tl.int64)[None, :] * width + inner[:, None]
    row_mask = row < rows
    out_mask = out < outs
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for number in range(1 if SPLIT else SPLITS):
        start = (split + number) * per_split
        part = tl.zeros([ROWS, OUTS], tl.float32)
        for group in range(start, tl.minimum(start + per_split, groups)):
            at_inner = group * INNER
            there = inner < width - at_inner
            a = tl.load(x_at + at_inner, mask=row_mask[:, None] & there[None, :], other=0.0)
            b = tl.load(weight_at + at_inner, mask=out_mask[None, :] & there[:, None], other=0.0)
            if BLOCKED:
                row_scale = tl.load(x_scales + row * groups + group, mask=row_mask, other=0.0)
                # All outputs of a tile lie in one block.
                row_scale *= tl.load(scales + first_out // 128 * groups + group)
                part += code_product(a, b) * row_scale[:, None]
            elif ROWS < 64:
                part += code_product(a, b)
            else:
                part = matrix_product(a, b, part)
        if not BLOCKED:
            # Each part by itself: a part of a split is rounded in the same way.
            part *= tl.load(x_scales + row, mask=row_mask, other=0.0)[:, None]
            part *= tl.load(scales + out, mask=out_mask, other=0.0)[None, :]
        if BLOCKED or INTERPRET:
            total += part
        else:
            # Explicit, so that no scale is fused with it: for sm_100 `ptxas` of Triton 3.6 does
            # that to pairs of numbers (FFMA2) even where fused multiply-adds are forbidden.
            total = tl.inline_asm_elementwise(
                "add.rn.f32 $0, $1, $2;", "=f,f,f", [total, part], tl.float32, is_pure=True, pack=1
            )
    mask = row_mask[:, None] & out_mask[None, :]
    if SPLIT:
        at_part = (split.to(tl.int64) * rows + row)[:, None] * outs + out[None, :]
        tl.store(y + at_part, total, mask=mask)
    else:
        if bias is not None:
            total += tl.load(bias + out, mask=out_mask, other=0.0).to(tl.float32)[None, :]
        y_at = y + row.to(tl.int64)[:, None] * y_stride + out[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=mask)


def quantise_rows(x: torch.Tensor, *, blocked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [N, in] → codes [N, in] e4m3 and scales fp32: [N, 1], or [N, in / 128] if
    `blocked`."""
    rows, width = x.shape
    assert x.stride(1) == 1
    groups = triton.cdiv(width, BLOCK) if blocked else 1
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    _quantise_kernel[(rows, groups)](
        x,
        codes,
        scales,
        width,
        x.stride(0),
        groups,
        GROUP=BLOCK if blocked else 0,
        TILE=2048,
        HIGH=HIGH,
        num_warps=1 if blocked else 8,
    )
    return codes, scales


def product_fp8(
    x: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    config: Fp8Config,
    dtype: torch.dtype | None = None,
    *,
    library: ScaledProducts | None = None,
) -> torch.Tensor:
    """Quantise x [N, in] of the model's dtype and multiply → x · wᵀ + bias [N, out] in `dtype` (x's
    unless given).

    `library`: it takes the sizes that it serves.
    """
    codes, x_scales = quantise_rows(x, blocked=weight.blocked)
    return product_codes(codes, x_scales, weight, bias, config, dtype or x.dtype, library=library)


def product_codes(
    codes: torch.Tensor,
    x_scales: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor | None,
    config: Fp8Config,
    dtype: torch.dtype,
    *,
    library: ScaledProducts | None = None,
) -> torch.Tensor:
    """Compute `product_fp8` from codes [N, in] with scales as `quantise_rows` gives them."""
    rows, width = codes.shape
    outs = weight.shape[0]
    assert weight.blocked or weight.scales.shape == (outs, 1), "see Fp8Weight.per_row"
    assert codes.is_contiguous()
    assert not weight.blocked or BLOCK % config.outs == 0, "a tile of outputs of two blocks"
    groups = weight.scales.shape[1]
    assert x_scales.shape == (rows, groups), "scales of another granularity than the weight's"
    if library is not None and library.serves(weight, rows):
        y = library.product(codes, x_scales, weight)
        if bias is not None:
            y += bias
        return y.to(dtype)
    y = torch.empty(rows, outs, dtype=dtype, device=codes.device)
    steps = triton.cdiv(width, BLOCK)
    per_split = triton.cdiv(steps, count_splits(config.programs, outs, config.outs, steps))
    splits = triton.cdiv(steps, per_split)
    apart = splits > 1 and rows <= FEW_ROWS
    target = y
    if apart:
        target = torch.empty(splits, rows, outs, dtype=torch.float32, device=codes.device)
    tiles = triton.cdiv(rows, config.rows) * triton.cdiv(outs, config.outs)
    _product_kernel[(tiles, splits if apart else 1)](
        codes,
        x_scales,
        weight.data,
        weight.scales,
        bias,
        target,
        rows,
        width,
        outs,
        steps,
        y.stride(0),
        per_split,
        SPLITS=splits,
        SPLIT=apart,
        BLOCKED=weight.blocked,
        ROWS=config.rows,
        OUTS=config.outs,
        INNER=BLOCK,
        GROUPED=8,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if apart:
        add_parts(target, bias, y)
    return y


def quantise_weight(data: torch.Tensor) -> Fp8Weight:
    """Quantise a dense matrix [out, in] with one scale per output row, the largest value at
    `HIGH`."""
    wide = data.float()
    scales = (wide.abs().amax(1, keepdim=True) / HIGH).clamp_min(1e-30)
    return Fp8Weight((wide / scales).to(torch.float8_e4m3fn), scales)


def merge_fp8(parts: Sequence[Weight]) -> Fp8Weight | None:
    """Join weights one below the other as one, if all are fp8 and scaled alike; else return
    None."""
    fp8 = [part.per_row() for part in parts if isinstance(part, Fp8Weight)]
    if len(fp8) < len(parts) or len({part.blocked for part in fp8}) > 1:
        return None
    # A block of 128 rows must not reach into the next part.
    if fp8[0].blocked and any(part.shape[0] % BLOCK for part in fp8[:-1]):
        return None
    # Bytes, since not every torch can join fp8.
    data = torch.cat([part.data.view(torch.uint8) for part in fp8]).view(torch.float8_e4m3fn)
    return Fp8Weight(data, torch.cat([part.scales for part in fp8]))

"""Products of up to 16 rows, as fast as the weight streams in, with the operators around them.

Arithmetic: 2 · N operations per weight: with N rows N operations per byte in bf16, 2 · N in fp8,
where an H200 has 206: bandwidth binds by an order of magnitude. A kernel can miss this limit in
three ways. It has too few bytes in flight (4.8 TB/s at 0.8 µs are 29 KB on each of 132
multiprocessors); it spends its instructions on other work; or it is many kernels.

Shape. One program takes `OUTS` outputs and the whole input, in steps of `INNER` with `stages` of
them on their way: 16 outputs are 256 programs for a matrix of 4,096 outputs, two on each
multiprocessor, so the weights of an 8B model need no second kernel to add parts up. Smaller ones
split the input as in `split`; the program that finishes last (a counter per tile) adds the parts in
order, not another kernel. A row's result depends only on that row and the weight's shape.

Neighbours. A decode step is dozens of kernels per layer, and each costs microseconds of launch, so
this one includes its neighbours:

* the norm before it: rms(x) is one number per row, which can as well be multiplied onto the result;
  the loop also sums the squares, and the gain is applied to the input in registers;
* the gate after it: a program has the outputs of gate and up that belong together;
* the residual: added in fp32 before the one rounding.

Sources: split-K by the last to finish as in CUTLASS's semaphore; the fixed order is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..fuse import Norm
from ..weights import DenseWeight, Fp8Weight
from .gated import activate
from .quantise import code_product
from .split import count_splits
from .support import matrix_product


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """Cut of a launch; `outs`, `inner` and `programs` are part of the result's rounding."""

    outs: int = 16
    inner: int = 256
    warps: int = 4
    stages: int = 4
    programs: int = 264
    """The input is split until there are about this many programs."""
    rows: int = 16
    """Rows of a tile; at least those of the step."""
    norm: bool = False
    """Whether the preceding norm is computed here. It costs instructions for every row of the
    tile."""
    library: bool = False
    """Whether the library serves instead."""


@triton.jit
def _finish(
    sums,
    row,
    out,
    mask,
    operands,
    sizes,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Finish the sums of the whole input, once: `total`, and `other` of up [ROWS, OUTS]."""
    total, other, squares = sums
    scales, x_scales, bias, residual, y = operands
    rows, width, outs, residual_stride, eps = sizes
    row_mask = row < rows
    if NORM:
        factor = 1.0 / tl.sqrt(squares / width + eps)
        total *= factor[:, None]
        other *= factor[:, None]
    if SCALED:
        row_scale = tl.load(x_scales + row, mask=row_mask, other=0.0)[:, None]
        total *= row_scale * tl.load(scales + out, mask=out < outs, other=0.0)[None, :]
        if GATE != "":
            above = tl.load(scales + outs + out, mask=out < outs, other=0.0)
            other *= row_scale * above[None, :]
    if GATE != "":
        total = activate(total, other, GATE)
    if bias is not None:
        total += tl.load(bias + out, mask=out < outs, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        at = row.to(tl.int64)[:, None] * residual_stride + out[None, :]
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * outs + out[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    gain,
    weight,
    scales,
    x_scales,
    bias,
    residual,
    y,
    partial,
    tickets,
    rows,
    width,
    outs,
    x_stride,
    weight_stride,
    residual_stride,
    per_split,
    eps,
    offset,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    SCALED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Multiply a tile. GATE: the activation, or "": the weight is gate over up, with `outs` outputs
    each."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    start = split * per_split
    row = tl.arange(0, ROWS)
    out = tile * OUTS + tl.arange(0, OUTS)
    inner = tl.arange(0, INNER)
    row_mask = (row < rows)[:, None]
    out_mask = (out < outs)[None, :]
    x_at = x + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_at = weight + out.to(tl.int64)[None, :] * weight_stride + inner[:, None]
    up_at = weight_at + outs * weight_stride.to(tl.int64)
    total = tl.zeros([ROWS, OUTS], tl.float32)
    other = tl.zeros([ROWS, OUTS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for at in range(start, tl.minimum(start + per_split, width), INNER):
        there = inner < width - at
        a = tl.load(x_at + at, mask=row_mask & there[None, :], other=0.0)
        b = tl.load(weight_at + at, mask=out_mask & there[:, None], other=0.0)
        if NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            each = tl.load(gain + at + inner, mask=there, other=0.0).to(tl.float32) + offset
            a = (wide * each[None, :]).to(a.dtype)
        if SCALED:
            total += code_product(a, b)
        else:
            total = matrix_product(a, b, total)
        if GATE != "":
            above = tl.load(up_at + at, mask=out_mask & there[:, None], other=0.0)
            if SCALED:
                other += code_product(a, above)
            else:
                other = matrix_product(a, above, other)
    mask = row_mask & out_mask
    operands = scales, x_scales, bias, residual, y
    sizes = rows, width, outs, residual_stride, eps
    if SPLITS == 1:
        sums = total, other, squares
        _finish(sums, row, out, mask, operands, sizes, NORM, GATE, SCALED)
    else:
        # Parts of this tile: sums, sums of up, squares; each program writes its own.
        CELL: tl.constexpr = 2 * ROWS * OUTS + ROWS
        place = row[:, None] * OUTS + tl.arange(0, OUTS)[None, :]
        tiles = tl.num_programs(0)
        own = partial + (split * tiles + tile).to(tl.int64) * CELL
        tl.store(own + place, total, mask=row_mask)
        if GATE != "":
            tl.store(own + ROWS * OUTS + place, other, mask=row_mask)
        if NORM:
            tl.store(own + 2 * ROWS * OUTS + row, squares)
        # All threads must have written before one of them says so to the whole device.
        tl.debug_barrier()
        if tl.atomic_add(tickets + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(tickets + tile, 0)
            total = tl.zeros([ROWS, OUTS], tl.float32)
            other = tl.zeros([ROWS, OUTS], tl.float32)
            squares = tl.zeros([ROWS], tl.float32)
            for part in range(SPLITS):
                cell = partial + (part * tiles + tile).to(tl.int64) * CELL
                total += tl.load(cell + place, mask=row_mask, other=0.0, cache_modifier=".cg")
                if GATE != "":
                    other += tl.load(
                        cell + ROWS * OUTS + place, mask=row_mask, other=0.0, cache_modifier=".cg"
                    )
                if NORM:
                    squares += tl.load(cell + 2 * ROWS * OUTS + row, cache_modifier=".cg")
            sums = total, other, squares
            _finish(sums, row, out, mask, operands, sizes, NORM, GATE, SCALED)


def product_skinny(
    x: torch.Tensor,
    weight: DenseWeight | Fp8Weight,
    bias: torch.Tensor | None,
    config: SkinnyConfig,
    tickets: torch.Tensor,
    dtype: torch.dtype | None = None,
    *,
    norm: Norm | None = None,
    scales: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "",
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x [N, in] · weightᵀ + bias + residual → [N, out] in `dtype` (x's unless given); N ≤
    16. `y`: the result's memory, without gaps.

    `norm`: x is normed first. `scales`: x are codes, for an fp8 weight with a scale per row.
    `activation`: the weight is gate over up [2 · I, in] → act(gate) · up [N, I].
    """
    assert isinstance(weight, Fp8Weight) == (scales is not None), "codes are for codes"
    assert scales is None or dtype is not None, "codes do not say what they stand for"
    rows, width = x.shape
    assert rows <= config.rows, f"{rows} rows"
    outs = weight.shape[0] // 2 if activation else weight.shape[0]
    assert x.stride(1) == 1
    assert weight.data.stride(1) == 1
    assert residual is None or residual.stride(1) == 1
    if y is None:
        y = torch.empty(rows, outs, dtype=dtype or x.dtype, device=x.device)
    assert y.is_contiguous()
    steps = triton.cdiv(width, config.inner)
    per_split = triton.cdiv(steps, count_splits(config.programs, outs, config.outs, steps))
    splits = triton.cdiv(steps, per_split)
    tiles = triton.cdiv(outs, config.outs)
    partial = y
    if splits > 1:
        assert tiles <= len(tickets)
        cell = (2 * config.outs + 1) * config.rows
        partial = torch.empty(splits * tiles * cell, dtype=torch.float32, device=x.device)
    gain, eps, offset = norm or (x, 0.0, 0.0)
    _product_kernel[(tiles, splits)](
        x,
        gain,
        weight.data,
        weight.scales if isinstance(weight, Fp8Weight) else x,
        x if scales is None else scales,
        bias,
        residual,
        y,
        partial,
        tickets,
        rows,
        width,
        outs,
        x.stride(0),
        weight.data.stride(0),
        0 if residual is None else residual.stride(0),
        per_split * config.inner,
        eps,
        offset,
        NORM=norm is not None,
        GATE=activation,
        SCALED=scales is not None,
        SPLITS=splits,
        ROWS=config.rows,
        OUTS=config.outs,
        INNER=config.inner,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return y

"""Dense products whose rows do not depend on each other: the deterministic mode's matrix kernel.

Arithmetic: 2 · N · in · out operations on 2 · (N · in + in · out + N · out) bytes in bf16. With
few rows the weight's bytes bind, with more than about 200 (H200) the tensor cores.

The library (cuBLASLt through torch) is at the limit for both and serves by default, but its kernel
and order of summation depend on the number of rows. Here the tile of the inner dimension and the
order depend only on the weight's shape: a row's result has the same bits in any batch. The cost of
the mode is published by `make gpu-bench`. Tiles are walked in groups of `GROUPED` row tiles so that
a wave's weight tiles stay in L2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .split import FEW_ROWS, add_parts, count_splits
from .support import matrix_product


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Cut of a launch; `inner` is part of the result's rounding."""

    rows: int = 64
    outs: int = 128
    inner: int = 64
    warps: int = 4
    stages: int = 4
    programs: int = 0
    """The input is split until there are about this many programs for few rows; part of the
    result's rounding."""


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    weight,
    bias,
    y,
    rows,
    width,
    outs,
    x_stride,
    weight_stride,
    per_split,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    INNER: tl.constexpr,
    GROUPED: tl.constexpr,
):
    program = tl.program_id(0)
    row_tiles = tl.cdiv(rows, ROWS)
    out_tiles = tl.cdiv(outs, OUTS)
    per_group = GROUPED * out_tiles
    first = program // per_group * GROUPED
    size = tl.minimum(row_tiles - first, GROUPED)
    row_tile = first + (program % per_group) % size
    out_tile = (program % per_group) // size
    row = row_tile * ROWS + tl.arange(0, ROWS)
    out = out_tile * OUTS + tl.arange(0, OUTS)
    inner = tl.arange(0, INNER)
    # Either one part, of many programs, or all of them in order.
    split = tl.program_id(1)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_at = weight + out.to(tl.int64)[None, :] * weight_stride + inner[:, None]
    total = tl.zeros([ROWS, OUTS], tl.float32)
    for number in range(1 if SPLIT else SPLITS):
        # Not carried from turn to turn: where an inner loop begins with it, Triton forgets that.
        start = (split + number) * per_split
        part = tl.zeros([ROWS, OUTS], tl.float32)
        for at in range(start, tl.minimum(start + per_split, width), INNER):
            there = inner < width - at
            a = tl.load(x_at + at, mask=(row < rows)[:, None] & there[None, :], other=0.0)
            b = tl.load(weight_at + at, mask=(out < outs)[None, :] & there[:, None], other=0.0)
            part = matrix_product(a, b, part)
        total += part
    mask = (row < rows)[:, None] & (out < outs)[None, :]
    if SPLIT:
        at_part = (split.to(tl.int64) * rows + row)[:, None] * outs + out[None, :]
        tl.store(y + at_part, total, mask=mask)
    else:
        if bias is not None:
            total += tl.load(bias + out, mask=out < outs, other=0.0).to(tl.float32)[None, :]
        y_at = y + row.to(tl.int64)[:, None] * outs + out[None, :]
        tl.store(y_at, total.to(y.dtype.element_ty), mask=mask)


def product_dense(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: DenseConfig,
    dtype: torch.dtype | None = None,
    *,
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x [N, in] · weight [out, in] transposed + bias → [N, out] in `dtype` (x's unless
    given); `y`: the result's memory, without gaps."""
    rows, width = x.shape
    outs = weight.shape[0]
    assert x.stride(1) == 1
    assert weight.stride(1) == 1
    if y is None:
        y = torch.empty(rows, outs, dtype=dtype or x.dtype, device=x.device)
    assert y.is_contiguous()
    steps = triton.cdiv(width, config.inner)
    per_split = triton.cdiv(steps, count_splits(config.programs, outs, config.outs, steps))
    splits = triton.cdiv(steps, per_split)
    apart = splits > 1 and rows <= FEW_ROWS
    target = y
    if apart:
        target = torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(rows, config.rows) * triton.cdiv(outs, config.outs)
    _product_kernel[(tiles, splits if apart else 1)](
        x,
        weight,
        bias,
        target,
        rows,
        width,
        outs,
        x.stride(0),
        weight.stride(0),
        per_split * config.inner,
        SPLITS=splits,
        SPLIT=apart,
        ROWS=config.rows,
        OUTS=config.outs,
        INNER=config.inner,
        GROUPED=8,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if apart:
        add_parts(target, bias, y)
    return y

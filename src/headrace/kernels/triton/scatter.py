"""Rows of other parts at their places: a copy, one program per row and block of columns.

Bandwidth binds: each row is read once and written once, and x is not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 1024
"""Columns of a program: enough loads in flight for a row of a small model."""


@triton.jit
def _scatter_kernel(x, rows, places, width, x_stride, rows_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < width
    place = tl.load(places + row)
    found = tl.load(rows + row * rows_stride + columns, mask=mask, other=0.0)
    tl.store(x + place * x_stride + columns, found.to(x.dtype.element_ty), mask=mask)


def scatter(ops: object, x: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Replace x[places] of x [N, D] by rows [M, D] in their place in memory; return x."""
    count, width = rows.shape
    if count:
        grid = count, triton.cdiv(width, COLUMNS)
        strides = x.stride(0), rows.stride(0)
        _scatter_kernel[grid](x, rows, places, width, *strides, COLUMNS=COLUMNS)
    return x

"""RMSNorm, with the residual added before it and 8-bit codes written after it.

Arithmetic: per element 2 bytes read (4 with the residual), 2 written (4): about 4 operations per
element, far under one per byte of any GPU's ridge. Bandwidth binds, so each row is read once, its
square sum is taken in registers (fp32), and everything that needs the same row is fused. One
program per row: a row's sum has one order in any batch (row invariance).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .quantise import CODES, store_groups, store_row


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    total_out,
    scales,
    eps,
    offset,
    width,
    x_stride,
    groups,
    COLUMNS: tl.constexpr,
    QUANTISED: tl.constexpr,
    GROUP: tl.constexpr,
    HIGH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    mask = columns < width
    at = row * width + columns
    wide = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        # Rounded before it is normed: the next layer norms the sum that it finds in memory.
        total = wide.to(x.dtype.element_ty)
        tl.store(total_out + at, total, mask=mask)
        wide = total.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    gain = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32) + offset
    normed = wide * factor * gain
    if QUANTISED and GROUP > 0:
        store_groups(out, scales, row, 0, normed, width, groups, COLUMNS, GROUP, HIGH)
    elif QUANTISED:
        store_row(out, scales, row, columns, normed, mask, width, HIGH)
    else:
        tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    codes: str | None,
    group: int = 0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    rows, width = x.shape
    groups = triton.cdiv(width, group) if group else 1
    assert x.stride(1) == 1
    assert residual is None or residual.is_contiguous()
    dtype, high = CODES[codes] if codes else (x.dtype, 0.0)
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    total = torch.empty(rows, width, dtype=x.dtype, device=x.device) if residual is not None else x
    scales = torch.empty(rows, groups, dtype=torch.float32, device=x.device) if codes else None
    columns = max(group, triton.next_power_of_2(width))
    _norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        out if scales is None else scales,
        eps,
        offset,
        width,
        x.stride(0),
        groups,
        COLUMNS=columns,
        QUANTISED=codes is not None,
        GROUP=group,
        HIGH=high,
        num_warps=max(1, min(16, columns // 512)),
    )
    return out, scales, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Compute x [N, D] → x / rms(x) · (weight + offset) [N, D], in x's dtype."""
    return _launch(x, None, weight, eps, offset, None, 0)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(residual + x), residual + x); the sum is rounded to x's dtype first."""
    out, _, total = _launch(x, residual, weight, eps, offset, None, 0)
    return out, total


def rms_norm_codes(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    codes: str,
    group: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes [N, D] in fp8 or int8, scales fp32, residual + x).

    Scales are [N, 1], or [N, ceil(D / group)] for groups of `group` columns (a power of two).
    """
    out, scales, total = _launch(x, residual, weight, eps, offset, codes, group)
    assert scales is not None
    return out, scales, total

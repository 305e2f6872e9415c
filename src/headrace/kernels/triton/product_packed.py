"""Products with packed weights: y = x · wᵀ, the codes turned into values in registers.

Arithmetic. A weight costs bits / 8 bytes plus its share of scale and offset (0.5 to 1 byte) and
2 · N operations: with N rows that is 2 · N / 0.56 operations per byte for 4 bits in groups of 32.
On an H200 (206 bf16 operations per byte) bandwidth binds up to about 57 rows, the tensor cores
beyond. So one kernel with two cuts:

* few rows (decode): the grid must cover all multiprocessors although `out` alone gives too few
  tiles. So the input is split over programs ("split-K"), and a second kernel adds their partial
  sums in order. The number of splits is a function of the weight's shape, never of N.
* many rows: tiles of up to 128 rows, one split; a weight tile is decoded once for all its rows.

From some 512 rows on a third way is nearer to the limit: the weight is expanded to a dense matrix,
slice by slice, and the library multiplies. That writes and reads in · out · 2 bytes once more,
under a tenth of the product's time at 1,024 rows.

Values are code · scale + offset, rounded to x's dtype as the dense weight would be, so all three
see the same matrix; the power of two of an output is multiplied onto its sums. Up to 16 rows
`product_packed_skinny` needs a third of the instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..weights import TiledWeight
from .packed import BYTES, CHUNK
from .split import add_parts, count_splits
from .support import INTERPRETED, matrix_product
from .unpack import first_half, second_half

EXPANDED = 64 * 2**20
"""Bytes of a dense slice on its way to the library."""


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Cut of a launch. `outs` and `programs` are part of the result's rounding."""

    rows: int = 16
    outs: int = 64
    programs: int = 0
    """The input is split until there are about this many programs per tile of rows; 0: never."""
    warps: int = 4
    stages: int = 3
    library: bool = False
    """Whether to expand the weight and hand it to the library."""

    def chunks_per_split(self, chunks: int, outs: int) -> int:
        """Return the chunks of the input that one program takes, for a weight of `outs` outputs."""
        return -(-chunks // count_splits(self.programs, outs, self.outs, chunks))


@triton.jit
def group_values(
    code,
    pairs,
    chunk,
    out,
    out_mask,
    outs,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Decode code [OUTS, STEP] in the group of value IN of a chunk → fp32 without the factor."""
    group: tl.constexpr = IN // GROUP
    # One scale for a whole row of the step: a vector, not a matrix of equal numbers.
    if ZERO is None:
        pair = tl.load(pairs + (chunk * PLANES + group) * outs + out, mask=out_mask, other=0)
        value = code.to(tl.float32) * first_half(pair)[:, None] + second_half(pair)[:, None]
    else:
        pair = tl.load(pairs + (chunk * PLANES + group // 2) * outs + out, mask=out_mask, other=0)
        scale = second_half(pair) if group % 2 else first_half(pair)
        value = code.to(tl.float32) * scale[:, None] + (scale * -ZERO)[:, None]
    return value


@triton.jit
def sum_chunks(
    x_at,
    row_mask,
    base,
    pairs,
    out,
    out_mask,
    first,
    last,
    width,
    outs,
    total,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PLANES: tl.constexpr,
    STEP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Add the chunks `first` to `last` of x · wᵀ to total [ROWS, OUTS], without the outputs'
    factors.

    x_at [ROWS, STEP] points to the rows' first values, base [OUTS, STEP] to the codes of chunk
    `first` of the outputs `out`. A chunk is taken in steps of STEP values that share scale, byte
    columns and bit places.
    """
    wide_mask = out_mask[:, None]
    place = tl.arange(0, STEP)
    for chunk in range(first, last):
        if BITS == 5:
            plane = tl.load(base + 64, mask=wide_mask, other=0).to(tl.int32)
        for sub in tl.static_range(64 // STEP):
            if BITS == 6:
                plane = tl.load(base + (64 + sub * STEP % 32), mask=wide_mask, other=0)
                plane = plane.to(tl.int32)
            if BITS < 8:
                byte = tl.load(base + sub * STEP, mask=wide_mask, other=0).to(tl.int32)
            for half in tl.static_range(2):
                if BITS == 8:
                    code = tl.load(base + (half * 64 + sub * STEP), mask=wide_mask, other=0).to(
                        tl.int32
                    )
                else:
                    code = (byte >> (4 * half)) & 15
                if BITS == 5:
                    code |= ((plane >> ((half * 64 + sub * STEP) // 16)) & 1) << 4
                if BITS == 6:
                    code |= ((plane >> (2 * ((half * 64 + sub * STEP) // 32))) & 3) << 4
                inner = chunk * 128 + (half * 64 + sub * STEP)
                value = group_values(
                    code,
                    pairs,
                    chunk,
                    out,
                    out_mask,
                    outs,
                    half * 64 + sub * STEP,
                    GROUP,
                    ZERO,
                    PLANES,
                )
                there = row_mask & (place < width - inner)[None, :]
                inputs = tl.load(x_at + inner, mask=there, other=0.0)
                total = matrix_product(inputs, tl.trans(value.to(inputs.dtype)), total, INTERPRET)
        base += outs * BYTES
    return total


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x,
    codes,
    pairs,
    factors,
    bias,
    y,
    rows,
    width,
    outs,
    chunks,
    chunks_per_split,
    x_stride,
    y_stride,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PLANES: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
    SPLIT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    row_mask = (row < rows)[:, None]
    out_mask = out < outs
    first = split * chunks_per_split
    last = tl.minimum(first + chunks_per_split, chunks)
    total = tl.zeros([ROWS, OUTS], tl.float32)
    place = tl.arange(0, STEP)
    base = codes + first.to(tl.int64) * outs * BYTES + out[:, None] * BYTES + place[None, :]
    x_at = x + row.to(tl.int64)[:, None] * x_stride + place[None, :]
    total = sum_chunks(
        x_at,
        row_mask,
        base,
        pairs,
        out,
        out_mask,
        first,
        last,
        width,
        outs,
        total,
        BITS,
        BYTES,
        GROUP,
        ZERO,
        PLANES,
        STEP,
        INTERPRET,
    )
    total *= tl.load(factors + out, mask=out_mask, other=0.0)[None, :]
    mask = row_mask & out_mask[None, :]
    if SPLIT:
        at = (split.to(tl.int64) * rows + row)[:, None] * outs + out[None, :]
        tl.store(y + at, total, mask=mask)
    else:
        if BIAS:
            total += tl.load(bias + out, mask=out_mask, other=0.0).to(tl.float32)[None, :]
        at = row[:, None].to(tl.int64) * y_stride + out[None, :]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=mask)


def product_packed(
    x: torch.Tensor,
    weight: TiledWeight,
    bias: torch.Tensor | None,
    config: ProductConfig,
    dtype: torch.dtype | None = None,
    y: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x [N, in] → x · wᵀ + bias [N, out] in `dtype` (x's unless given), or into `y`."""
    rows, width = x.shape
    outs = weight.shape[0]
    assert width == weight.shape[1]
    assert x.stride(1) == 1
    if y is None:
        y = torch.empty(rows, outs, dtype=dtype or x.dtype, device=x.device)
    assert y.stride(1) == 1
    if config.library and y.dtype == x.dtype:
        return _through_library(x, weight, bias, y)
    chunks = weight.codes.shape[0]
    per_split = config.chunks_per_split(chunks, outs)
    splits = -(-chunks // per_split)
    target = y
    if splits > 1:
        target = torch.empty(splits, rows, outs, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, config.rows), triton.cdiv(outs, config.outs), splits)
    _product_kernel[grid](
        x,
        weight.codes,
        weight.pairs,
        weight.factors,
        x if bias is None else bias,
        target,
        rows,
        width,
        outs,
        chunks,
        per_split,
        x.stride(0),
        y.stride(0),
        BITS=weight.bits,
        BYTES=BYTES[weight.bits],
        GROUP=weight.group,
        ZERO=weight.zero,
        PLANES=weight.pairs.shape[1],
        BIAS=bias is not None,
        ROWS=config.rows,
        OUTS=config.outs,
        STEP=step_of(weight.bits, weight.group),
        SPLIT=splits > 1,
        INTERPRET=INTERPRETED,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    if splits > 1:
        add_parts(target, bias, y)
    return y


@triton.jit
def _expand_kernel(
    codes,
    pairs,
    factors,
    dense,
    width,
    outs,
    first_out,
    count,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    PLANES: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Expand one chunk of OUTS rows of the weight → dense [count, width], from row `first_out`
    on."""
    chunk = tl.program_id(1)
    local = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    mask = local < count
    wide_mask = mask[:, None]
    out = first_out + local
    factor = tl.load(factors + out, mask=mask, other=0.0)
    place = tl.arange(0, STEP)
    base = codes + (chunk.to(tl.int64) * outs + out)[:, None] * BYTES + place[None, :]
    to = dense + local.to(tl.int64)[:, None] * width + place[None, :]
    for sub in tl.static_range(64 // STEP):
        for half in tl.static_range(2):
            if BITS == 8:
                code = tl.load(base + (half * 64 + sub * STEP), mask=wide_mask, other=0)
                code = code.to(tl.int32)
            else:
                byte = tl.load(base + sub * STEP, mask=wide_mask, other=0).to(tl.int32)
                code = (byte >> (4 * half)) & 15
            if BITS == 5:
                plane = tl.load(base + 64, mask=wide_mask, other=0).to(tl.int32)
                code |= ((plane >> ((half * 64 + sub * STEP) // 16)) & 1) << 4
            if BITS == 6:
                plane = tl.load(base + (64 + sub * STEP % 32), mask=wide_mask, other=0)
                plane = plane.to(tl.int32)
                code |= ((plane >> (2 * ((half * 64 + sub * STEP) // 32))) & 3) << 4
            inner = chunk * 128 + (half * 64 + sub * STEP)
            value = group_values(
                code, pairs, chunk, out, mask, outs, half * 64 + sub * STEP, GROUP, ZERO, PLANES
            )
            value *= factor[:, None]
            there = wide_mask & (place < width - inner)[None, :]
            tl.store(to + inner, value.to(dense.dtype.element_ty), mask=there)


def expand(weight: TiledWeight, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows `first` … of a packed weight as a dense matrix [count, in]."""
    outs, width = weight.shape
    dense = torch.empty(count, width, dtype=dtype, device=weight.codes.device)
    _expand_kernel[(triton.cdiv(count, 64), weight.codes.shape[0])](
        weight.codes,
        weight.pairs,
        weight.factors,
        dense,
        width,
        outs,
        first,
        count,
        BITS=weight.bits,
        BYTES=BYTES[weight.bits],
        GROUP=weight.group,
        ZERO=weight.zero,
        PLANES=weight.pairs.shape[1],
        OUTS=64,
        STEP=step_of(weight.bits, weight.group),
        num_warps=4,
    )
    return dense


def _through_library(
    x: torch.Tensor, weight: TiledWeight, bias: torch.Tensor | None, y: torch.Tensor
) -> torch.Tensor:
    outs, width = weight.shape
    slice_outs = max(64, EXPANDED // (width * x.element_size()))
    for low in range(0, outs, slice_outs):
        high = min(low + slice_outs, outs)
        dense = expand(weight, low, high - low, x.dtype)
        into = y[:, low:high]
        if bias is None:
            torch.mm(x, dense.t(), out=into)
        else:
            torch.addmm(bias[low:high], x, dense.t(), out=into)
    return y


def step_of(bits: int, group: int) -> int:
    """Return the values that share a scale; with high bits in planes, also one bit place: 16."""
    return 16 if bits in (5, 6) else min(group, 64)


assert CHUNK == 128, "the kernel's index arithmetic is written for chunks of two 64s"

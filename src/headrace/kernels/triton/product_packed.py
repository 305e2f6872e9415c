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

Outputs are the first side of the product. On Hopper that side may come from registers, where codes
become values (`unpack`: no conversion); as the second side they would be written to shared memory
and read again. The activations, which are few, are the second side. All three ways see one matrix,
see `weights_of`; the power of two of an output is multiplied onto its sums. Up to 16 rows
`product_packed_skinny` needs fewer instructions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..weights import TiledWeight
from .packed import packing_of
from .split import add_parts, count_splits
from .support import INTERPRET, matrix_product
from .unpack import CHUNK, Packing, added, first_half, second_half, unpack, unpack_step

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
    """Whether to expand the weight and pass it to the library."""
    whole: bool = False
    """Whether 128 inputs are multiplied at once: see `sum_chunks`."""

    def chunks_per_split(self, chunks: int, outs: int) -> int:
        """Return the chunks of the input that one program takes, for a weight of `outs` outputs."""
        return -(-chunks // count_splits(self.programs, outs, self.outs, chunks))


@triton.constexpr_function
def step_of(packing: Packing) -> int:
    """Return the values of a chunk that are decoded at a time: they share one scale."""
    return 16 if packing.group == 16 else unpack_step(packing)


@triton.constexpr_function
def plane_of(at: int, packing: Packing) -> int:
    """Return the word of a chunk's scales that value `at` needs."""
    return at // packing.group if packing.zero is None else at // packing.group // 2


@triton.jit
def weights_of(like, byte, plane, second, pair, AT: tl.constexpr, PACKING: tl.constexpr):
    """Decode byte [OUTS, STEP], see `unpack`, with the scales `pair` [OUTS] of its groups → weights
    in the type of `like`, without the outputs' factors.

    Code minus zero is exact. Scale and offset are rounded to the type, and what they make of it is
    rounded once more: a product, or a multiply-add, for two weights at once.
    """
    number = unpack(like, byte, plane, second, AT, PACKING.bits, PACKING.magic, False)
    # The upper nibbles of eight bits in bf16 have an excess of their own.
    APART: tl.constexpr = PACKING.bits == 8 and PACKING.magic == 0x43
    ZERO: tl.constexpr = 0 if PACKING.zero is None else PACKING.zero
    EXCESS: tl.constexpr = (128 if APART else added(PACKING.bits, PACKING.magic)) + ZERO
    FIRST: tl.constexpr = PACKING.zero is None or AT // PACKING.group % 2 == 0
    scale = first_half(pair) if FIRST else second_half(pair)
    scale = scale.to(like.dtype)[:, None]
    offset = second_half(pair).to(like.dtype)[:, None]
    if INTERPRET:
        # Its bf16 has no arithmetic.
        number, scale, offset = number.to(tl.float32), scale.to(tl.float32), offset.to(tl.float32)
    if EXCESS != 0:
        number -= EXCESS
    if APART:
        high = unpack(like, byte, plane, second, AT, PACKING.bits, PACKING.magic, True)
        if INTERPRET:
            high = high.to(tl.float32)
        number += high - 2048
    if PACKING.zero is None:
        number = tl.fma(number, scale, tl.broadcast_to(offset, number.shape))
    else:
        number *= scale
    return number.to(like.dtype)


@triton.jit
def _beside(first, second):
    """Join [OUTS, N] and [OUTS, N] → [OUTS, 2 · N]."""
    both = tl.permute(tl.join(first, second), (0, 2, 1))
    return tl.reshape(both, [first.shape[0], 2 * first.shape[1]])


@triton.jit
def _sides_of(
    like,
    code_at,
    plane_at,
    pair_at,
    plane,
    second,
    outs,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    PACKING: tl.constexpr,
    STEP: tl.constexpr,
):
    """Decode COUNT values of each half of a chunk, from value FIRST of the half on → two tensors
    [OUTS, COUNT]."""
    if COUNT > STEP:
        for side in tl.static_range(2):
            next_low, next_high = _sides_of(
                like,
                code_at,
                plane_at,
                pair_at,
                plane,
                second,
                outs,
                FIRST + side * (COUNT // 2),
                COUNT // 2,
                PACKING,
                STEP,
            )
            if side == 0:
                low, high = next_low, next_high
            else:
                low, high = _beside(low, next_low), _beside(high, next_high)
    else:
        if PACKING.bits == 6:
            plane = tl.load(plane_at + FIRST % 32)
        byte = tl.load(code_at + FIRST)
        pair = tl.load(pair_at + plane_of(FIRST, PACKING) * outs)
        low = weights_of(like, byte, plane, second, pair, FIRST, PACKING)
        if PACKING.bits == 8:
            byte = tl.load(code_at + (64 + FIRST))
        pair = tl.load(pair_at + plane_of(64 + FIRST, PACKING) * outs)
        high = weights_of(like, byte, plane, second, pair, 64 + FIRST, PACKING)
    return low, high


@triton.jit
def sum_chunks(
    x_at,
    row_mask,
    line,
    pair_at,
    first,
    last,
    width,
    outs,
    total,
    PACKING: tl.constexpr,
    STEP: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Add the chunks `first` to `last` of w · xᵀ to total [OUTS, ROWS], without the outputs'
    factors.

    x_at [STEP, ROWS], or [128, ROWS] of WHOLE chunks, points to the first values of the rows
    `row_mask` [ROWS], line [OUTS, 1] to the codes of chunk `first`, pair_at [OUTS] to its scales.
    EVEN: the input is whole chunks.
    """
    place = tl.arange(0, STEP)
    inner = tl.arange(0, 128)
    code_at = line + place[None, :]
    plane_at = line + 64 + (place % (16 if PACKING.bits == 5 else 32))[None, :]
    in_first = (place < 16)[None, :]
    like = tl.zeros([1], x_at.dtype.element_ty)
    for chunk in range(first, last):
        plane = place
        second = place
        if PACKING.bits == 5:
            # A mask over columns must be a load's, see `product_packed_skinny`.
            plane = tl.load(plane_at, mask=in_first, other=0)
            second = tl.load(plane_at, mask=~in_first, other=0)
        if PACKING.planes == 1:
            pair = tl.load(pair_at)
        if WHOLE:
            low, high = _sides_of(
                like, code_at, plane_at, pair_at, plane, second, outs, 0, 64, PACKING, STEP
            )
            there = row_mask[None, :]
            if not EVEN:
                there = there & (inner < width - chunk * 128)[:, None]
            inputs = tl.load(x_at, mask=there, other=0.0)
            total = matrix_product(_beside(low, high), inputs, total)
        for sub in tl.static_range(0 if WHOLE else 64 // STEP):
            if PACKING.bits == 6:
                plane = tl.load(plane_at + sub * STEP % 32)
            if PACKING.bits != 8:
                byte = tl.load(code_at + sub * STEP)
            for half in tl.static_range(2):
                if PACKING.bits == 8:
                    byte = tl.load(code_at + (half * 64 + sub * STEP))
                if PACKING.planes > 1:
                    pair = tl.load(pair_at + plane_of(half * 64 + sub * STEP, PACKING) * outs)
                value = weights_of(like, byte, plane, second, pair, half * 64 + sub * STEP, PACKING)
                there = row_mask[None, :]
                if not EVEN:
                    begin = chunk * 128 + (half * 64 + sub * STEP)
                    there = there & (place < width - begin)[:, None]
                inputs = tl.load(x_at + (half * 64 + sub * STEP), mask=there, other=0.0)
                total = matrix_product(value, inputs, total)
        code_at += outs.to(tl.int64) * PACKING.bytes
        plane_at += outs.to(tl.int64) * PACKING.bytes
        pair_at += outs * PACKING.planes
        x_at += 128
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
    PACKING: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
):
    STEP: tl.constexpr = step_of(PACKING)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    split = tl.program_id(2)
    row_mask = row < rows
    # The last output again rather than a mask: it is not stored.
    held = tl.minimum(out, outs - 1)
    first = split * chunks_per_split
    last = tl.minimum(first + chunks_per_split, chunks)
    place = tl.arange(0, 128 if WHOLE else STEP)
    total = sum_chunks(
        x + row.to(tl.int64)[None, :] * x_stride + place[:, None] + first * 128,
        row_mask,
        codes + (first.to(tl.int64) * outs + held)[:, None] * PACKING.bytes,
        pairs + first.to(tl.int64) * PACKING.planes * outs + held,
        first,
        last,
        width,
        outs,
        tl.zeros([OUTS, ROWS], tl.float32),
        PACKING,
        STEP,
        WHOLE,
        EVEN,
    )
    total *= tl.load(factors + held)[:, None]
    mask = (out < outs)[:, None] & row_mask[None, :]
    if SPLIT:
        at = (split.to(tl.int64) * rows + row)[None, :] * outs + out[:, None]
        tl.store(y + at, total, mask=mask)
    else:
        if bias is not None:
            total += tl.load(bias + held).to(tl.float32)[:, None]
        at = row[None, :].to(tl.int64) * y_stride + out[:, None]
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
        bias,
        target,
        rows,
        width,
        outs,
        chunks,
        per_split,
        x.stride(0),
        y.stride(0),
        PACKING=packing_of(weight, x.dtype),
        EVEN=width % 128 == 0,
        ROWS=config.rows,
        OUTS=config.outs,
        SPLIT=splits > 1,
        WHOLE=config.whole and x.dtype != torch.float32,
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
    PACKING: tl.constexpr,
    OUTS: tl.constexpr,
):
    """Expand one chunk of OUTS rows of the weight → dense [count, width], from row `first_out`
    on."""
    STEP: tl.constexpr = step_of(PACKING)
    chunk = tl.program_id(1)
    local = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    out = tl.minimum(first_out + local, outs - 1)
    like = tl.zeros([1], dense.dtype.element_ty)
    factor = tl.load(factors + out)[:, None]
    place = tl.arange(0, STEP)
    line = codes + (chunk.to(tl.int64) * outs + out)[:, None] * PACKING.bytes
    plane_at = line + 64 + (place % (16 if PACKING.bits == 5 else 32))[None, :]
    pair_at = pairs + chunk * PACKING.planes * outs + out
    to = dense + local.to(tl.int64)[:, None] * width + place[None, :]
    plane = place
    second = place
    if PACKING.bits == 5:
        plane = tl.load(plane_at, mask=(place < 16)[None, :], other=0)
        second = tl.load(plane_at, mask=(place >= 16)[None, :], other=0)
    for sub in tl.static_range(64 // STEP):
        if PACKING.bits == 6:
            plane = tl.load(plane_at + sub * STEP % 32)
        for half in tl.static_range(2):
            column = half * 64 + sub * STEP if PACKING.bits == 8 else sub * STEP
            byte = tl.load(line + place[None, :] + column)
            pair = tl.load(pair_at + plane_of(half * 64 + sub * STEP, PACKING) * outs)
            value = weights_of(like, byte, plane, second, pair, half * 64 + sub * STEP, PACKING)
            inner = chunk * 128 + (half * 64 + sub * STEP)
            there = (local < count)[:, None] & (place < width - inner)[None, :]
            value = value.to(tl.float32) * factor
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
        PACKING=packing_of(weight, dtype),
        OUTS=64,
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


assert CHUNK == 128, "the kernel's index arithmetic is written for chunks of two 64s"

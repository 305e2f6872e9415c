"""Filters and the draw without a sort: the threshold of a row is found digit by digit.

Arithmetic. A row of logits is 4 · V bytes (600 kB for 152k tokens): it fits into L2, and one pass
over it is a few microseconds of one multiprocessor. A sort would make some 30 passes through
global memory. Instead, floats are mapped to unsigned integers of the same order, and the largest
threshold that keeps the wanted share is built four bits at a time: each of eight passes counts
(top-k) or weighs (top-p) the tokens at or above each of 15 candidates, all in registers. One more
pass finds the token at which the cumulated mass passes the row's uniform number.

The rules are those of `kernels.sampling`: min-p, then top-k, then top-p of what they kept; equal
logits stay or go together; the draw inverts the distribution in token order at `uniform`. Masses
are summed in fp32 here and in fp64 there, so a draw that falls within rounding of a border may
differ. One program per row: nothing depends on the batch.

Source of the idea: radix selection (Alabi et al., "Fast k-selection on GPUs", 2012).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..draws import DrawParameters

TILE = 4096


@triton.jit
def _ordered(value):
    """fp32 → uint32 with the same order (negative numbers flipped)."""
    bits = value.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits | -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _unordered(code):
    bits = code.to(tl.int32, bitcast=True)
    restored = tl.where(bits < 0, bits & 2147483647, ~bits)
    return restored.to(tl.float32, bitcast=True)


@triton.jit
def _threshold(
    logits, width, factor, peak, floor, wanted, MASS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Largest ordered code such that the tokens at or above it, and not below `floor`, number
    (or, with MASS, weigh) at least `wanted`."""
    found = tl.full([1], 0, tl.uint32)
    digits = tl.arange(0, 16).to(tl.uint32)
    for step in tl.static_range(8):
        candidates = found | (digits << (28 - 4 * step))
        sums = tl.zeros([16], tl.float32)
        for at in range(0, width, TILE):
            columns = at + tl.arange(0, TILE)
            value = tl.load(logits + columns, mask=columns < width, other=float("-inf")) * factor
            code = _ordered(value)
            counted = (columns < width) & (code >= floor)
            if MASS:
                part = tl.where(counted, tl.exp(value - peak), 0.0)
            else:
                part = tl.where(counted, 1.0, 0.0)
            hit = code[:, None] >= candidates[None, :]
            sums += tl.sum(tl.where(hit, part[:, None], 0.0), 0)
        # Candidates ascend and sums descend: the last one that still keeps enough.
        enough = tl.sum((sums >= wanted).to(tl.int32), 0)
        digit = tl.maximum(enough - 1, 0).to(tl.uint32)
        found = found | (digit << (28 - 4 * step))
    return tl.max(found, 0)


@triton.jit
def _draw_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, uniforms, tokens, width, stride,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    factor = 1.0 / tl.load(temperatures + row)
    peak = float("-inf")
    for at in range(0, width, TILE):
        columns = at + tl.arange(0, TILE)
        value = tl.load(logits + columns, mask=columns < width, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(value, 0))
    peak = peak * factor
    # log(0) is -inf: nothing is cut.
    floor = _ordered(peak + tl.log(tl.load(min_ps + row).to(tl.float32)))
    top_k = tl.load(top_ks + row)
    if (top_k > 0) & (top_k < width):
        code = _threshold(logits, width, factor, peak, floor * 0, top_k.to(tl.float32), False, 1024)
        floor = tl.maximum(floor, code)
    top_p = tl.load(top_ps + row).to(tl.float32)
    if top_p < 1.0:
        mass = 0.0
        for at in range(0, width, TILE):
            columns = at + tl.arange(0, TILE)
            value = tl.load(logits + columns, mask=columns < width, other=float("-inf")) * factor
            kept = (columns < width) & (_ordered(value) >= floor)
            mass += tl.sum(tl.where(kept, tl.exp(value - peak), 0.0), 0)
        code = _threshold(logits, width, factor, peak, floor, top_p * mass, True, 1024)
        floor = tl.maximum(floor, code)

    mass = 0.0
    for at in range(0, width, TILE):
        columns = at + tl.arange(0, TILE)
        value = tl.load(logits + columns, mask=columns < width, other=float("-inf")) * factor
        kept = (columns < width) & (_ordered(value) >= floor)
        mass += tl.sum(tl.where(kept, tl.exp(value - peak), 0.0), 0)
    target = tl.load(uniforms + row).to(tl.float32) * mass
    passed = 0.0
    token = 0
    last = 0
    done = 0
    for at in range(0, width, TILE):
        columns = at + tl.arange(0, TILE)
        value = tl.load(logits + columns, mask=columns < width, other=float("-inf")) * factor
        kept = (columns < width) & (_ordered(value) >= floor)
        part = tl.where(kept, tl.exp(value - peak), 0.0)
        ahead = passed + tl.cumsum(part, 0)
        hit = kept & (ahead > target)
        first = tl.min(tl.where(hit, columns, 2147483647), 0)
        token = tl.where((done == 0) & (first < 2147483647), first, token)
        done = tl.where(first < 2147483647, 1, done)
        # The product may round up to the whole mass: then it is the last token that has any.
        last = tl.maximum(last, tl.max(tl.where(part > 0, columns, 0), 0))
        passed += tl.sum(part, 0)
    tl.store(tokens + row, tl.where(done == 1, token, last).to(tl.int64))


def draw(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """logits [R, V] fp32 → tokens [R] int64, one draw per row; see `kernels.sampling.draw`."""
    rows, width = logits.shape
    assert logits.stride(1) == 1
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _draw_kernel[(rows,)](
        logits, parameters.temperature, parameters.top_k, parameters.top_p, parameters.min_p,
        parameters.uniform, tokens, width, logits.stride(0), TILE=TILE, num_warps=16, maxnreg=128,
    )  # fmt: skip
    return tokens


@triton.jit
def _argmax_kernel(logits, tokens, width, stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = float("-inf")
    token = tl.program_id(0) * 0
    for at in range(0, width, TILE):
        columns = at + tl.arange(0, TILE)
        value = tl.load(logits + row * stride + columns, mask=columns < width, other=float("-inf"))
        top = tl.max(value, 0)
        first = tl.min(tl.where(value == top, columns, 2147483647), 0)
        # Strictly greater: of equal logits the smallest id wins, as in the reference.
        token = tl.where(top > best, first, token)
        best = tl.maximum(best, top)
    tl.store(tokens + row, token.to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """logits [R, V] fp32 → the most likely token [R] int64; of equals the smallest id."""
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _argmax_kernel[(rows,)](logits, tokens, width, logits.stride(0), TILE=TILE, num_warps=16)
    return tokens

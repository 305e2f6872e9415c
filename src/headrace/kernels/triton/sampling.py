"""Filters and the draw without a sort: the threshold of a row is found digit by digit.

Arithmetic. A row of logits is 4 · V bytes (600 kB for 152k tokens). It fits into L2, and one
program per 4,096 logits reads it in a microsecond; one program per row would need forty turns, each
with a memory access and a sum over its threads. A sort would make some 30 passes. Instead, floats
are mapped to unsigned integers of the same order. The largest threshold that keeps the wanted share
is built four bits at a time: a kernel per digit counts (top-k) or weighs (top-p) the tokens at or
above each of 16 candidates. The next kernel first adds up the sums of all tiles, in order, and
takes the digit. Two more find the tile and then the token at which the cumulative mass passes the
row's uniform number: 19 kernels of two microseconds, and nothing is read back. The two filters are
16 of them. If no row of a step uses a filter, which the host knows before, its eight kernels are
not launched. Rows without the filter exit its kernels at once.

A greedy row may be among the others: min_p 1 leaves only the largest logit, and a uniform number of
0 takes the first among equals. It reads only the logits of the tile with the token.

The rules are those of `kernels.draws`: min-p, then top-k, then top-p of what they kept; equal
logits stay or go together; the draw inverts the distribution in token order at `uniform`. Masses
are summed in fp32 here and in fp64 there, so a draw within rounding of a boundary may differ.
Programs see one row: nothing depends on the batch.

Source of the idea: radix selection (Alabi et al., "Fast k-selection on GPUs", 2012).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..draws import DrawParameters

TILE = 4096
"""Logits per program."""
TURN = tl.constexpr(1024)
"""Logits in one comparison with all candidates."""
DIGITS = 8
"""Digits of four bits in a key."""


@triton.jit
def _ordered(value):
    """Map fp32 → uint32 with the same order (negative numbers flipped)."""
    bits = value.to(tl.int32, bitcast=True)
    flipped = tl.where(bits < 0, ~bits, bits | -2147483648)
    return flipped.to(tl.uint32, bitcast=True)


@triton.jit
def _peaks_kernel(logits, peaks, places, width, stride, tiles, TILE: tl.constexpr):
    """Write the largest logit of each tile of a row, and where it first is; NaN if any is NaN."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns = tile * TILE + tl.arange(0, TILE)
    value = tl.load(logits + row * stride + columns, mask=columns < width, other=float("-inf"))
    peak = tl.max(value, 0)
    spoiled = tl.max((value != value).to(tl.int32), 0) > 0
    tl.store(peaks + row * tiles + tile, tl.where(spoiled, float("nan"), peak))
    first = tl.min(tl.where((value == peak) & (columns < width), columns, 2147483647), 0)
    tl.store(places + row * tiles + tile, first)


def _peaks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find for logits [R, V] the largest of each tile [R, tiles] fp32, and its place in the row."""
    rows, width = logits.shape
    assert logits.stride(1) == 1
    tiles = triton.cdiv(width, TILE)
    peaks = torch.empty(rows, tiles, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, tiles, dtype=torch.int32, device=logits.device)
    _peaks_kernel[(rows, tiles)](
        logits, peaks, places, width, logits.stride(0), tiles, TILE=TILE, num_warps=8
    )
    return peaks, places


@triton.jit
def _begin(peaks, temperatures, min_ps, row, tiles, TILES: tl.constexpr):
    """Return (the factor of logits, the largest logit times it, the code below which min-p
    cuts)."""
    tile = tl.arange(0, TILES)
    found = tl.load(peaks + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
    min_p = tl.load(min_ps + row).to(tl.float32)
    # If only the largest is left nothing may be rounded: neighbours would become equals.
    only = min_p >= 1.0
    factor = tl.where(only, 1.0, 1.0 / tl.load(temperatures + row))
    peak = tl.max(found, 0) * factor
    # log(0) is -inf: nothing is cut.
    return factor, peak, _ordered(tl.where(only, peak, peak + tl.log(min_p)))


@triton.jit
def _spoiled(peaks, row, tiles, TILES: tl.constexpr):
    """Return whether a logit of the row is NaN."""
    tile = tl.arange(0, TILES)
    found = tl.load(peaks + row * tiles + tile, mask=tile < tiles, other=0.0)
    return tl.max((found != found).to(tl.int32), 0) > 0


@triton.jit
def _add_up(sums, row, tiles, TILES: tl.constexpr):
    """Add up sums [rows, tiles, 16] of a row over its tiles → [16]."""
    tile = tl.arange(0, TILES)
    at = (row * tiles + tile)[:, None] * 16 + tl.arange(0, 16)[None, :]
    return tl.sum(tl.load(sums + at, mask=(tile < tiles)[:, None], other=0.0), 0)


@triton.jit
def _take(prefix, sums, wanted, shift):
    """Return the prefix with the largest digit that still keeps enough: sums descend."""
    enough = tl.sum((sums >= wanted).to(tl.int32), 0)
    return prefix | (tl.maximum(enough - 1, 0).to(tl.uint32) << shift)


@triton.jit
def _wanted(row, top_ks, top_ps, masses, width, tiles, MASS: tl.constexpr, TILES: tl.constexpr):
    """Return (whether the filter is on, the least count or mass of the kept tokens). `masses`: the
    sums of the first digit, whose first candidate is zero and keeps everything; None there."""
    if MASS:
        top_p = tl.load(top_ps + row).to(tl.float32)
        wanted = 0.0
        if masses is not None:
            first = tl.where(tl.arange(0, 16) == 0, _add_up(masses, row, tiles, TILES), 0.0)
            wanted = top_p * tl.sum(first, 0)
        return top_p < 1.0, wanted
    top_k = tl.load(top_ks + row)
    return (top_k > 0) & (top_k < width), top_k.to(tl.float32)


@triton.jit
def _load_code(codes, row):
    return tl.load(codes + row).to(tl.uint32, bitcast=True)


@triton.jit
def _store_code(codes, row, code):
    tl.store(codes + row, code.to(tl.int32, bitcast=True))


@triton.jit
def _above_top_k(floor, row, top_ks, before, before_sums, width, tiles, TILES: tl.constexpr):
    """Return the floor, raised to the threshold whose last digit `before_sums` gives."""
    cuts, count = _wanted(row, top_ks, top_ks, None, width, tiles, False, TILES)
    if cuts:
        last = _add_up(before_sums, row, tiles, TILES)
        floor = tl.maximum(floor, _take(_load_code(before, row), last, count, 0))
    return floor


@triton.jit(do_not_specialize=["shift"])
def _digit_kernel(
    logits,
    peaks,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    before,
    before_sums,
    masses,
    prefixes,
    sums,
    floors,
    width,
    stride,
    tiles,
    shift,
    MASS: tl.constexpr,
    FIRST: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Find one digit of the threshold of top-k, or with MASS of top-p.

    `before`, `before_sums`: prefixes and sums of the digit before; for the first digit of top-p
    those of the last of top-k, if that was done (TOP_K), whose threshold is among the `floors` from
    then on."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    factor, peak, floor = _begin(peaks, temperatures, min_ps, row, tiles, TILES)
    if MASS:
        if FIRST:
            if TOP_K:
                floor = _above_top_k(floor, row, top_ks, before, before_sums, width, tiles, TILES)
            if tile == 0:
                _store_code(floors, row, floor)
        else:
            floor = _load_code(floors, row)
    active, wanted = _wanted(
        row, top_ks, top_ps, None if FIRST else masses, width, tiles, MASS, TILES
    )
    if not active:
        return
    prefix = floor * 0
    if not FIRST:
        found = _add_up(before_sums, row, tiles, TILES)
        prefix = _take(_load_code(before, row), found, wanted, shift + 4)
    if tile == 0:
        _store_code(prefixes, row, prefix)
    digits = tl.arange(0, 16)
    candidates = prefix | (digits.to(tl.uint32) << shift)
    total = tl.zeros([16], tl.float32)
    for at in range(0, TILE, TURN):
        columns = tile * TILE + at + tl.arange(0, TURN)
        there = columns < width
        value = tl.load(logits + row * stride + columns, mask=there, other=float("-inf")) * factor
        code = _ordered(value)
        counted = there & (code >= floor)
        part = tl.where(counted, 1.0, 0.0)
        if MASS:
            part = tl.where(counted, tl.exp(value - peak), 0.0)
        hit = code[:, None] >= candidates[None, :]
        total += tl.sum(tl.where(hit, part[:, None], 0.0), 0)
    tl.store(sums + (row * tiles + tile) * 16 + digits, total)


@triton.jit
def _mass_kernel(
    logits,
    peaks,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    uniforms,
    before,
    before_sums,
    masses,
    kept,
    floors,
    width,
    stride,
    tiles,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write the mass `kept` [rows, tiles] that all filters leave in each tile. TOP_K, TOP_P:
    whether each was done; `before` and `before_sums` are the last digit of the last one."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    factor, peak, floor = _begin(peaks, temperatures, min_ps, row, tiles, TILES)
    if TOP_P:
        floor = _load_code(floors, row)
        cuts, wanted = _wanted(row, top_ks, top_ps, masses, width, tiles, True, TILES)
        if cuts:
            last = _add_up(before_sums, row, tiles, TILES)
            floor = tl.maximum(floor, _take(_load_code(before, row), last, wanted, 0))
    elif TOP_K:
        floor = _above_top_k(floor, row, top_ks, before, before_sums, width, tiles, TILES)
    if tile == 0:
        _store_code(floors + tl.num_programs(0), row, floor)
    if (tl.load(min_ps + row) >= 1.0) & (tl.load(uniforms + row) == 0.0):
        # The most likely token, the first among equals: any mass at it will do.
        found = tl.load(peaks + row * tiles + tile) * factor
        tl.store(kept + row * tiles + tile, tl.where(found == peak, 1.0, 0.0))
        return
    columns = tile * TILE + tl.arange(0, TILE)
    there = columns < width
    value = tl.load(logits + row * stride + columns, mask=there, other=float("-inf")) * factor
    part = tl.where(there & (_ordered(value) >= floor), tl.exp(value - peak), 0.0)
    tl.store(kept + row * tiles + tile, tl.sum(part, 0))


@triton.jit
def _token_kernel(
    logits,
    peaks,
    temperatures,
    min_ps,
    uniforms,
    kept,
    floors,
    tokens,
    width,
    stride,
    tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Find the tile in which the mass passes the uniform number, and there the token."""
    row = tl.program_id(0).to(tl.int64)
    factor, peak, floor = _begin(peaks, temperatures, min_ps, row, tiles, TILES)
    floor = _load_code(floors + tl.num_programs(0), row)
    each = tl.arange(0, TILES)
    mass = tl.load(kept + row * tiles + each, mask=each < tiles, other=0.0)
    ends = tl.cumsum(mass, 0)
    target = tl.load(uniforms + row).to(tl.float32) * tl.sum(mass, 0)
    tile = tl.min(tl.where(ends > target, each, TILES), 0)
    # The product may round up to the whole mass: then it is the last that has any.
    tile = tl.where(tile < TILES, tile, tl.max(tl.where(mass > 0, each, 0), 0))
    passed = tl.sum(tl.where(each < tile, mass, 0.0), 0)
    columns = tile * TILE + tl.arange(0, TILE)
    there = columns < width
    value = tl.load(logits + row * stride + columns, mask=there, other=float("-inf")) * factor
    keep = there & (_ordered(value) >= floor)
    part = tl.where(keep, tl.exp(value - peak), 0.0)
    hit = keep & (passed + tl.cumsum(part, 0) > target)
    first = tl.min(tl.where(hit, columns, 2147483647), 0)
    last = tl.max(tl.where(part > 0, columns, 0), 0)
    token = tl.where(first < 2147483647, first, last)
    token = tl.where(_spoiled(peaks, row, tiles, TILES), -1, token)
    tl.store(tokens + row, token.to(tl.int64))


def draw(logits: torch.Tensor, parameters: DrawParameters) -> torch.Tensor:
    """Draw one token per row: logits [R, V] fp32 → tokens [R] int64, -1 for a row with a NaN; see
    `kernels.sampling.draw`."""
    rows, width = logits.shape
    assert logits.stride(1) == 1
    tiles = triton.cdiv(width, TILE)

    def made(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    peaks, _ = _peaks(logits)
    filters = [parameters.top_k is not None, parameters.top_p is not None]
    # By filter and digit, each at a multiple of 16 bytes: other addresses would compile another
    # kernel, in the middle of service. Floors before and after top-p.
    count = sum(filters)
    prefixes = made(max(1, count), DIGITS, -(-rows // 4) * 4, dtype=torch.int32)
    sums = made(max(1, count), DIGITS, rows if count else 1, tiles, 16)
    floors, kept = made(2, rows, dtype=torch.int32), made(rows, tiles)
    tokens = made(rows, dtype=torch.int64)
    given = logits, peaks, parameters.temperature, parameters.min_p
    # The stand-in for a filter that no row has is not read.
    asked = (
        parameters.temperature if parameters.top_k is None else parameters.top_k,
        parameters.temperature if parameters.top_p is None else parameters.top_p,
    )
    size = width, logits.stride(0), tiles
    cut = {"TILE": TILE, "TILES": triton.next_power_of_2(tiles)}
    before, before_sums = prefixes[0, 0], sums[0, 0]
    number = 0
    for mass in (False, True):
        if not filters[mass]:
            continue
        for digit in range(DIGITS):
            _digit_kernel[(rows, tiles)](
                *given,
                *asked,
                before,
                before_sums,
                sums[number, 0],
                prefixes[number, digit],
                sums[number, digit],
                floors,
                *size,
                4 * (DIGITS - 1 - digit),
                MASS=mass,
                FIRST=digit == 0,
                TOP_K=filters[0],
                num_warps=8,
                **cut,
            )
            before, before_sums = prefixes[number, digit], sums[number, digit]
        number += 1
    _mass_kernel[(rows, tiles)](
        *given,
        *asked,
        parameters.uniform,
        before,
        before_sums,
        sums[max(0, count - 1), 0],
        kept,
        floors,
        *size,
        TOP_K=filters[0],
        TOP_P=filters[1],
        num_warps=8,
        **cut,
    )
    _token_kernel[(rows,)](
        *given, parameters.uniform, kept, floors, tokens, *size, num_warps=8, **cut
    )
    return tokens


@triton.jit
def _best_kernel(peaks, places, tokens, tiles, TILES: tl.constexpr):
    """Find the most likely token; among equal logits the smallest id wins, as in the reference."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    there = tile < tiles
    peak = tl.load(peaks + row * tiles + tile, mask=there, other=float("-inf"))
    place = tl.load(places + row * tiles + tile, mask=there, other=2147483647)
    best = tl.max(peak, 0)
    first = tl.min(tl.where(peak == best, place, 2147483647), 0)
    token = tl.where(first < 2147483647, first, 0)
    token = tl.where(_spoiled(peaks, row, tiles, TILES), -1, token)
    tl.store(tokens + row, token.to(tl.int64))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely token [R] int64 of logits [R, V] fp32; the smallest id among equals,
    -1 for a row with a NaN.

    Two kernels: one program per row would read its 500 kB in 32 turns of a microsecond each, while
    nothing else runs.
    """
    rows, _ = logits.shape
    peaks, places = _peaks(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    tiles = peaks.shape[1]
    _best_kernel[(rows,)](
        peaks, places, tokens, tiles, TILES=triton.next_power_of_2(tiles), num_warps=1
    )
    return tokens

"""Splitting a sum over programs, where its results are too few tiles: the parts and their addition.

A product of few rows is as fast as the weight streams in, and that takes programs on every
multiprocessor; a matrix of 4,096 outputs is 64 tiles, fewer than half of an H200's. So the input is
cut in parts, each a program's own, and a second kernel adds the partial sums in order. The number
of parts follows from the weight's shape, never from the rows; and where a step of many rows needs
no splitting, one program sums part by part in the same order: a row's bits stay the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FEW_ROWS = 64
"""Most rows for which the parts are programs of their own."""
TICKETS = 1 << 16
"""Most results whose parts the last program to finish may join: tiles of outputs, or an entry's KV
heads."""


def count_splits(programs: int, outs: int, tile: int, steps: int) -> int:
    """Return the parts of an input of `steps` inner tiles, so that there are about `programs`
    programs."""
    return max(1, min(programs // -(-outs // tile), steps // 2))


def make_tickets(device: torch.device) -> torch.Tensor:
    """Make the counters of results: zero before and after every launch, so one serves a stream."""
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)


@triton.jit
def join_parts(
    total,
    other,
    real,
    partial,
    tickets,
    own,
    cells,
    split,
    splits,
    GATE: tl.constexpr,
    OUTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Leave this program's part of result `own` of `cells`: sums [OUTS, ROWS], and `other`, those
    of up, if GATE is not "", for the rows that are `real` [ROWS].

    Returns the sums of all parts, in order, and whether this program is the last. Only the last one
    has the sums: it finishes the result.
    """
    CELL: tl.constexpr = (2 if GATE != "" else 1) * OUTS * ROWS
    place = tl.arange(0, ROWS)[None, :] * OUTS + tl.arange(0, OUTS)[:, None]
    there = real[None, :]
    mine = partial + (split * cells + own).to(tl.int64) * CELL
    tl.store(mine + place, total, mask=there)
    if GATE != "":
        tl.store(mine + OUTS * ROWS + place, other, mask=there)
    # All threads must have written before one of them says so to the whole device.
    tl.debug_barrier()
    last = tl.atomic_add(tickets + own, 1, sem="acq_rel") == splits - 1
    if last:
        tl.store(tickets + own, 0)
        total = tl.zeros([OUTS, ROWS], tl.float32)
        other = tl.zeros([OUTS, ROWS], tl.float32)
        for part in range(splits):
            cell = partial + (part * cells + own).to(tl.int64) * CELL
            total += tl.load(cell + place, mask=there, other=0.0, cache_modifier=".cg")
            if GATE != "":
                other += tl.load(
                    cell + OUTS * ROWS + place, mask=there, other=0.0, cache_modifier=".cg"
                )
    return total, other, last


@triton.jit(do_not_specialize=["elements"])
def _sum_kernel(
    partial,
    bias,
    y,
    elements,
    outs,
    y_stride,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add partial sums [SPLITS, elements] in order."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = at < elements
    total = tl.zeros([TILE], tl.float32)
    for split in range(SPLITS):
        here = tl.cast(split, tl.int64) * elements
        total += tl.load(partial + here + at, mask=mask, other=0.0)
    row = at // outs
    out = at - row * outs
    if bias is not None:
        total += tl.load(bias + out, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row.to(tl.int64) * y_stride + out, total.to(y.dtype.element_ty), mask=mask)


def add_parts(partial: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """Sum partial [splits, N, out] fp32 in order, + bias → y [N, out]."""
    splits, rows, outs = partial.shape
    elements = rows * outs
    _sum_kernel[(triton.cdiv(elements, 512),)](
        partial,
        bias,
        y,
        elements,
        outs,
        y.stride(0),
        SPLITS=splits,
        TILE=512,
        num_warps=4,
    )

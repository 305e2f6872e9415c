"""Join of the pieces of attention over latents: a kernel after `attention_decode`.

Arithmetic: each piece of an entry's KV left, of each head, 512 sums in fp32 with their mass: 2 KiB,
compared with 1,152 bytes of KV for each of its tokens that 16 heads share. Bandwidth of L2 binds,
and with few entries its latency: so a program takes one row of an entry and reads `JOINED` pieces
at once, in order, of 64 that a long context may have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

JOINED = 16
"""Pieces per turn."""


@triton.jit
def _join_kernel(
    partial,
    log_sums,
    pieces,
    out,
    out_stride,
    tiles,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    ROPE: tl.constexpr,
    JOINED: tl.constexpr,
):
    first = tl.program_id(0)
    line = pieces + first * 8
    parts = tl.load(line + 7)
    # The program of an entry's first piece joins all of them; one that is alone is finished.
    if (parts < 2) | (tl.load(line + 6) > 0):
        return
    row = tl.program_id(1) % PACKED
    tile = tl.program_id(1) // PACKED
    token = row // GROUP
    if token >= tl.load(line + 2):
        return
    columns = ROPE + tl.arange(0, WIDTH_PADDED)
    highest = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([WIDTH_PADDED], tl.float32)
    for at in range(0, parts, JOINED):
        piece = at + tl.arange(0, JOINED)
        there = piece < parts
        cell = ((first + piece).to(tl.int64) * tiles + tile) * PACKED + row
        peak = tl.load(log_sums + cell * 2, mask=there, other=float("-inf"))
        weight = tl.load(log_sums + cell * 2 + 1, mask=there, other=0.0)
        mask = there[:, None] & (columns < WIDTH)[None, :]
        found = tl.load(partial + cell[:, None] * WIDTH + columns[None, :], mask=mask, other=0.0)
        top = tl.maximum(highest, tl.max(peak, 0))
        # A token may see nothing of a piece.
        safe = tl.where(top == float("-inf"), 0.0, top)
        grow = tl.exp2(peak - safe)
        shrink = tl.exp2(highest - safe)
        total = total * shrink + tl.sum(found * grow[:, None], 0)
        mass = mass * shrink + tl.sum(weight * grow, 0)
        highest = top
    to = out + (tl.load(line + 1) + token).to(tl.int64) * out_stride
    to += (tile * GROUP + row % GROUP) * WIDTH + columns
    tl.store(to, (total / mass).to(out.dtype.element_ty), mask=columns < WIDTH)


def join_pieces(
    partial: torch.Tensor,
    log_sums: torch.Tensor,
    pieces: torch.Tensor,
    out: torch.Tensor,
    group: int,
    rope: int,
) -> None:
    """Join partial [pieces, tiles, tokens · group, E] and log_sums [..., 2] → rows of out [N, H, E]
    from column `rope` on, for the entries that `pieces` cuts into several; see
    `attention_plan.COLUMNS`."""
    count, tiles, packed, width = partial.shape
    _join_kernel[(count, tiles * packed)](
        partial,
        log_sums,
        pieces,
        out,
        out.stride(0),
        tiles,
        GROUP=group,
        PACKED=packed,
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width - rope),
        ROPE=rope,
        JOINED=JOINED,
        num_warps=4,
    )

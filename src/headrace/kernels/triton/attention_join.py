"""Join of the pieces of attention: by the last program of `attention_decode`, and over latents by a
kernel after it.

Arithmetic of that: each piece of an entry's KV left, of each head, 512 sums in fp32 with their
mass: 2 KiB, compared with 1,152 bytes of KV for each of its tokens that 16 heads share. Bandwidth
of L2 binds, and with few entries its latency: so a program takes one row of an entry and reads
`JOINED` pieces at once, in order, of 64 that a long context may have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .kv_codes import turn_back
from .support import sink_mass

JOINED = 16
"""Pieces per turn."""


@triton.jit
def leave_piece(
    memory,
    out_stride,
    sums,
    piece_of,
    head,
    kv_heads,
    count,
    real,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    JOINED: tl.constexpr,
    FOUR: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Write this program's piece, one of several, to memory: the PACKED = tokens x GROUP query rows
    of one KV head in `partial` [pieces, kv_heads, PACKED, WIDTH]. The last program to finish joins
    all of them, in order and JOINED in a turn → `count` tokens at out_at [..., GROUP, WIDTH].
    Pieces over latents are joined by `attention_join`."""
    partial, log_sums, tickets, sinks, out_at = memory
    output, best, total = sums
    number, part, parts, entry = piece_of
    rows = tl.arange(0, ROWS)
    columns = ROPE + tl.arange(0, WIDTH_PADDED)
    cell = (number * kv_heads + head) * PACKED + rows
    tl.store(partial + cell[:, None] * WIDTH + columns[None, :], output, mask=real)
    tl.store(log_sums + cell * 2, best, mask=rows < count * GROUP)
    tl.store(log_sums + cell * 2 + 1, total, mask=rows < count * GROUP)
    if ROPE > 0:
        return
    # All threads must have written before one of them says so to the whole device.
    tl.debug_barrier()
    pair = entry * kv_heads + head
    if tl.atomic_add(tickets + pair, 1, sem="acq_rel") == parts - 1:
        tl.store(tickets + pair, 0)
        row = tl.arange(0, PADDED)
        owned = row < count * GROUP
        inside = owned[:, None] & (columns < WIDTH)[None, :]
        highest = tl.full([PADDED], float("-inf"), tl.float32)
        mass = tl.zeros([PADDED], tl.float32)
        joined = tl.zeros([PADDED, WIDTH_PADDED], tl.float32)
        for at in range(number - part, number - part + parts, JOINED):
            piece = at + tl.arange(0, JOINED)
            cells = (piece * kv_heads + head)[:, None] * PACKED + row[None, :]
            there = (piece < number - part + parts)[:, None] & owned[None, :]
            # Others' parts are in L2; this multiprocessor's own cache may hold old values.
            peak = tl.load(log_sums + cells * 2, there, float("-inf"), cache_modifier=".cg")
            weight = tl.load(log_sums + cells * 2 + 1, there, 0.0, cache_modifier=".cg")
            found = tl.load(
                partial + cells[:, :, None] * WIDTH + columns[None, None, :],
                mask=there[:, :, None] & inside[None, :, :],
                other=0.0,
                cache_modifier=".cg",
            )
            top = tl.maximum(highest, tl.max(peak, 0))
            # Rows that only fill the tile have no peak, and a token may have none in a piece.
            safe = tl.where(top == float("-inf"), 0.0, top)
            grow = tl.exp2(peak - safe[None, :])
            shrink = tl.exp2(highest - safe)
            joined = joined * shrink[:, None] + tl.sum(found * grow[:, :, None], 0)
            mass = mass * shrink + tl.sum(weight * grow, 0)
            highest = top
        if sinks is not None:
            mass += sink_mass(sinks, head * GROUP + row % GROUP, highest)
        joined /= mass[:, None]
        if FOUR:
            joined = turn_back(joined)
        place = row * WIDTH
        if PACKED > GROUP:
            place = row // GROUP * out_stride + row % GROUP * WIDTH
        target = out_at + place[:, None] + columns[None, :]
        tl.store(target, joined.to(out_at.dtype.element_ty), mask=inside)


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

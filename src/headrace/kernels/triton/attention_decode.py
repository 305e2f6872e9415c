"""Paged attention for entries of one token: flash decoding, split along the KV.

Arithmetic. A query head reads nothing that its group does not share, so per entry and KV head the
kernel moves 2 · L · E elements of K and V and does 4 · L · E · (H / G) operations: with bf16 KV
that is 2 · H / G operations per byte, far below the ridge of any GPU (H200: 206), so bandwidth
binds and the aim is to stream K and V once, from all multiprocessors.

Shape. One program takes one entry, one KV head and one *split* of `SPLIT` tokens; its H / G query
rows are packed into one tile (padded to 16, what the tensor cores take), so K and V are read once
per KV head. Splits are cut at multiples of `SPLIT` from the sequence's start. The program of an
entry and KV head that finishes last (a counter) joins all of its splits, in order, as in
`product_skinny`: a second kernel would be 3 of 120 microseconds at 32 x 4k and a fifth of the
operator at one row. `SPLIT` is shorter in small steps, so a row's rounding depends on the step's
bucket (the deterministic mode has one kernel for all entries instead). Programs whose split lies
outside the row's window leave at once, which costs about a microsecond per wave of empty programs.

Codes. An 8-bit cache halves the bytes, and then instructions bind: at 4.8 TB/s each of an H200's
528 schedulers has 790 slots for 4 KiB. Widened to bf16 the loop took 1,068 and 128 conversions at
an eighth of the rate; as fp16 (`quantise.from_codes`) it takes 360 (machine code of sm_90).

Source: Dao et al., "Flash-Decoding for long-context inference" (2023), with the split fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..operators import GroupBatch, KvLayer, StepBatch
from .early import launch_options, wait_for_inputs
from .quantise import from_codes
from .support import INTERPRETED, LOG2E, matrix_product, soft_cap

SHORTEST = 128
"""Tokens of a split at least: shorter ones are mostly beginning, end and a part to add."""
LIFT = tl.constexpr(256.0)
"""On the scales of V where weights are fp16, whose smallest number is 6e-8; taken off at the end.
"""
HIGHEST = tl.constexpr(65504.0)
"""Largest fp16."""
TOGETHER = 4096
"""Values of partial results that are joined in one turn, all on their way at once: 32 a
thread. With twice as many Triton 3.6 gives the whole kernel 152 registers, not 128."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a decode launch is cut; `split` is part of the result's rounding, the rest is not."""

    split: int = 512
    """Tokens of the KV that one program takes, where the entries alone are programs enough."""
    tile: int = 64
    """Tokens per turn of the inner loop; divides `split`."""
    warps: int = 4
    stages: int = 3
    programs: int = 264
    """A step of nothing but few decodes halves `split`, down to `SHORTEST` or one tile, until
    there are so many programs: a lone sequence of 1,024 tokens is two splits of 512 for each KV
    head, 16 programs on 132 multiprocessors."""

    def split_of(self, sequences: int, longest: int) -> int:
        """For so many (entry, KV head) of at most `longest` tokens."""
        split = self.split
        while split > max(SHORTEST, self.tile) and sequences * -(-longest // split) < self.programs:
            split //= 2
        return split


@triton.jit
def _join(
    partial,
    log_sums,
    out_at,
    first_row,
    first,
    last,
    splits,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    JOINED: tl.constexpr,
):
    """The splits [first, last) of GROUP query heads, whose parts begin at row `first_row` of
    `partial` [rows, splits, WIDTH] → out_at [GROUP, WIDTH]; JOINED of them in a turn."""
    heads = tl.arange(0, GROUP_PADDED)
    columns = tl.arange(0, WIDTH_PADDED)
    real = (heads < GROUP)[:, None] & (columns < WIDTH)[None, :]
    best = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    output = tl.zeros([GROUP_PADDED, WIDTH_PADDED], tl.float32)
    for at in range(first, last, JOINED):
        split = at + tl.arange(0, JOINED)
        cell = (first_row + heads)[None, :] * splits + split[:, None]
        there = (split < last)[:, None] & (heads < GROUP)[None, :]
        # What other multiprocessors wrote is in L2; this one's own cache may hold what was before.
        peak = tl.load(log_sums + cell * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
        mass = tl.load(log_sums + cell * 2 + 1, mask=there, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partial + cell[:, :, None] * WIDTH + columns[None, None, :],
            mask=there[:, :, None] & real[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        top = tl.maximum(best, tl.max(peak, 0))
        # Heads that only fill the tile have no peak.
        top = tl.where(heads < GROUP, top, 0.0)
        grow = tl.exp2(peak - top[None, :])
        shrink = tl.exp2(best - top)
        output = output * shrink[:, None] + tl.sum(part * grow[:, :, None], 0)
        total = total * shrink + tl.sum(mass * grow, 0)
        best = top
    at_out = out_at + heads[:, None] * WIDTH + columns[None, :]
    tl.store(at_out, (output / total[:, None]).to(out_at.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["table_stride", "splits"])
def _split_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    tables,
    lengths,
    query_starts,
    partial,
    log_sums,
    tickets,
    out,
    q_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    table_stride,
    out_stride,
    kv_heads,
    splits,
    scale_log2,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    HALVES: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    JOINED: tl.constexpr,
    EARLY: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """HALVES: codes are multiplied as fp16, with `scale` in the query already."""
    wait_for_inputs(EARLY)
    entry = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    first_row = tl.load(query_starts + entry)
    if tl.load(query_starts + entry + 1) - first_row != 1:
        return
    length = tl.load(lengths + entry)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    low = split * SPLIT
    high = tl.minimum(low + SPLIT, length)
    if (low >= length) | (high <= begin):
        return

    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH_PADDED)
    real = (rows < GROUP)[:, None] & (columns < WIDTH)[None, :]
    q_at = first_row.to(tl.int64) * q_stride + (head * GROUP + rows) * WIDTH
    query = tl.load(q + q_at[:, None] + columns[None, :], mask=real, other=0.0)

    if HALVES:
        scaled = query.to(tl.float32) * scale_log2
        query = tl.minimum(tl.maximum(scaled, -HIGHEST), HIGHEST).to(tl.float16)
        scale_log2 = 1.0

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, WIDTH_PADDED], tl.float32)
    inside = (columns < WIDTH)[None, :]
    # Whole tiles before the window are skipped; the first one that matters is masked.
    start = low + tl.maximum(begin - low, 0) // TILE * TILE
    for at in range(start, high, TILE):
        places = at + tl.arange(0, TILE)
        seen = (places < high) & (places >= begin)
        block = tl.load(tables + entry * table_stride + places // BLOCK, mask=seen, other=0)
        token = block.to(tl.int64) * block_stride + head * head_stride + (places % BLOCK) * WIDTH
        wanted = seen[:, None] & inside
        key = tl.load(k + token[:, None] + columns[None, :], mask=wanted, other=0.0)
        value = tl.load(v + token[:, None] + columns[None, :], mask=wanted, other=0.0)
        if HALVES:
            key = from_codes(key, INTERPRET)
            value = from_codes(value, INTERPRET)
        scores = matrix_product(
            query, tl.trans(key).to(query.dtype), tl.zeros([ROWS, TILE], tl.float32), INTERPRET
        )
        if SCALED:
            scale_at = block.to(tl.int64) * scale_block_stride + head * BLOCK + places % BLOCK
            scores *= tl.load(k_scale + scale_at, mask=seen, other=0.0)[None, :]
        if SOFTCAP > 0:
            scores = soft_cap(scores * (scale_log2 / 1.4426950408889634), SOFTCAP)
            scores *= 1.4426950408889634
        else:
            scores *= scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(best - top)
        total = total * shrink + tl.sum(weights, 1)
        if SCALED:
            value_scale = tl.load(v_scale + scale_at, mask=seen, other=0.0)
            if HALVES:
                value_scale = tl.minimum(value_scale * LIFT, HIGHEST)
            weights *= value_scale[None, :]
        output = matrix_product(
            weights.to(query.dtype), value.to(query.dtype), output * shrink[:, None], INTERPRET
        )
        best = top

    if HALVES:
        output *= 1.0 / LIFT
    first = begin // SPLIT
    last = tl.cdiv(length, SPLIT)
    out_at = out + first_row.to(tl.int64) * out_stride + head * GROUP * WIDTH
    if last - first == 1:
        finished = (output / total[:, None]).to(out.dtype.element_ty)
        tl.store(out_at + rows[:, None] * WIDTH + columns[None, :], finished, mask=real)
    else:
        pair = entry * kv_heads + head
        own = pair.to(tl.int64) * GROUP
        cell = (own + rows) * splits + split
        tl.store(partial + cell[:, None] * WIDTH + columns[None, :], output, mask=real)
        tl.store(log_sums + cell * 2, best, mask=rows < GROUP)
        tl.store(log_sums + cell * 2 + 1, total, mask=rows < GROUP)
        # All threads have written before one of them says so to the whole device.
        tl.debug_barrier()
        if tl.atomic_add(tickets + pair, 1, sem="acq_rel") == last - first - 1:
            tl.store(tickets + pair, 0)
            _join(
                partial,
                log_sums,
                out_at,
                own,
                first,
                last,
                splits,
                GROUP,
                GROUP_PADDED,
                WIDTH,
                WIDTH_PADDED,
                JOINED,
            )


def attention_decode(
    q: torch.Tensor,
    kv: KvLayer,
    batch: StepBatch,
    view: GroupBatch,
    out: torch.Tensor,
    scale: float,
    softcap: float | None,
    config: DecodeConfig,
    tickets: torch.Tensor,
    *,
    early: bool = False,
) -> None:
    """Fill `out` [N, H, E] for the entries of one token; rows of others are left alone.

    `tickets` [entries · G or more] int32: zero before and after, see `split.make_tickets`.

    q [N, H, E] in bf16, fp16 or fp32; KV in q's dtype, or fp8 / int8 codes with scales. H is a
    multiple of G. Nothing is read back: safe inside a CUDA graph whose `max_length` bounds L.
    """
    _, heads, width = q.shape
    kv_heads, block = kv.k.shape[1], kv.k.shape[2]
    entries = batch.lengths.shape[0]
    split = config.split
    if batch.max_count == 1:
        # Such steps are graphs, made before readiness; others would compile one more kernel.
        split = config.split_of(entries * kv_heads, batch.max_length)
    splits = max(1, -(-batch.max_length // split))
    partial = torch.empty(entries, heads, splits, width, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(entries, heads, splits, 2, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    k_scale, v_scale = (q, q) if kv.k_scale is None else (kv.k_scale, kv.v_scale)
    scaled = kv.k_scale is not None
    padded = max(16, triton.next_power_of_2(width))
    group_padded = triton.next_power_of_2(group)
    window = view.window or 0
    assert entries * kv_heads <= len(tickets), f"{entries} entries of {kv_heads} heads"
    _split_kernel[(entries, kv_heads, splits)](
        q,
        kv.k,
        kv.v,
        k_scale,
        v_scale,
        view.tables,
        batch.lengths,
        batch.query_starts,
        partial,
        log_sums,
        tickets,
        out,
        q.stride(0),
        kv.k.stride(0),
        kv.k.stride(1),
        k_scale.stride(0),
        view.tables.stride(0),
        out.stride(0),
        kv_heads,
        splits,
        scale * LOG2E,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        WIDTH=width,
        WIDTH_PADDED=padded,
        BLOCK=block,
        SPLIT=split,
        TILE=config.tile,
        WINDOW=window,
        SOFTCAP=softcap or 0.0,
        SCALED=scaled,
        HALVES=scaled and q.dtype != torch.float32,
        GROUP_PADDED=group_padded,
        JOINED=max(1, TOGETHER // (group_padded * padded)),
        INTERPRET=INTERPRETED,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_options(early),
    )

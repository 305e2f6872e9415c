"""Paged attention for entries of several tokens: chunks of prompts after a prefix.

Arithmetic. A chunk of C tokens after P earlier ones does 4 · E · H · C · (P + C / 2) operations on
(P + C) · 2 · E · G elements of KV: hundreds of operations per byte as soon as C is a few hundred,
so the tensor cores bind and the aim is to keep both products (q · kᵀ and p · v) on them.

Shape. A program takes `ROWS` query rows of one entry and one KV head: `ROWS / (H / G)` tokens with
all query heads of the KV head stacked, so K and V are read once per group. A program finds its
entry by bisection in the host's list of chunks (`attention_plan`; each chunk starts at its own
tile). Decoding entries are not in this list: with 862 of them a prompt of 1,000 tokens had 889
programs that exited at once and 32 that worked. The loop over the KV is unmasked up to the first
token of the tile and masked over the diagonal. Tiles along the KV start at multiples of `TILE` from
the sequence's start, so a row sums in the same order for any division of its prompt.

Order. Causal tiles differ much in work. Programs start in the order of their numbers, so the
longest come first: the last tiles of all KV heads, then the preceding ones. With several tiles per
multiprocessor, this takes at most 3 % more than the work divided by the multiprocessors, like a
persistent kernel with a queue. One head after the other, first tiles first, took 6 % more at 8,192
tokens, 30 % at 2,048. Heads whose KV does not fit into L2 together are processed in sections.

Latents (see `attention_decode`) take 2,176 operations per head, where keys and values of 192 and
128 numbers would take 640, but nothing is unpacked. So prompts take 3.4 times the operations of
expanded heads, but only in attention: below some thousand tokens of context other products
dominate. Tiles have 64 rows; a row's sums of 512 are 128 registers of eight warps.

Sources: Dao, "FlashAttention-2" (2023); packing of grouped heads as in flash decoding; sections of
heads and the reversed order as in FlashAttention-3's scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..arrays import tensor
from ..attention_plan import AttentionPlan
from ..operators import GroupBatch, KvLayer
from .attention_decode import head_tiles, rotary_part, tokens_across
from .kv_codes import add_biases, biases_of, levels, turn_back
from .quantise import HIGHEST, LIFT, from_codes, scale_query
from .support import LOG2E, first_seen, matrix_product, sink_mass, soft_cap

L2 = 32 * 2**20
"""Bytes of KV that heads computed together may read over and over."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Cut of a prefill launch; `tile` is part of the result's rounding."""

    rows: int = 128
    tile: int = 64
    warps: int = 8
    stages: int = 2


@triton.jit
def _find_chunk(chunks, program, count, TOKENS: tl.constexpr):
    """Return the chunk whose tiles include `program`: those of chunk c start at c + (tokens before
    it) / TOKENS."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        first = tl.load(chunks + middle * 8 + 4) // TOKENS + middle
        if first <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _turn(
    query,
    query_rope,
    at,
    kv,
    biased,
    positions,
    begin,
    length,
    scale_log2,
    output,
    total,
    best,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    HALVES: tl.constexpr,
    FOUR: tl.constexpr,
    ACROSS: tl.constexpr,
    BIASES: tl.constexpr,
    ROPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add one tile of the KV at place `at`, by online softmax. `kv`: where this head's KV lies;
    `biased`: what `add_biases` takes besides."""
    k, v, k_scale, v_scale, tables, entry, head = kv[0]
    block_stride, head_stride, scale_block_stride, table_stride = kv[1]
    q, q_at, owned, factor, biases, cos, sin = biased
    query_at = q + q_at
    ROWS: tl.constexpr = query.shape[0]
    columns = ROPE + tl.arange(0, query.shape[1])
    if ROPE > 0:
        head = 0
    places = at + tl.arange(0, TILE)
    there = (places < length) & (places >= begin)
    held = there
    if ACROSS:
        held = places // BLOCK * BLOCK < length
    block = tl.load(tables + entry * table_stride + places // BLOCK, mask=held, other=0)
    token = block.to(tl.int64) * block_stride + head * head_stride + (places % BLOCK) * WIDTH
    wanted = there[:, None] & (columns < WIDTH)[None, :]
    key = tl.load(k + token[:, None] + columns[None, :], mask=wanted, other=0.0)
    value = key
    if HALVES:
        key = from_codes(key, INNER=True)
    scores = tl.zeros([ROWS, TILE], tl.float32)
    if ROPE > 0:
        key_rope = rotary_part(k + token, there, ROPE)
        if HALVES:
            key_rope = from_codes(key_rope, INNER=True)
        key_rope = tl.trans(key_rope).to(query.dtype)
        scores = matrix_product(query_rope, key_rope, scores)
    scores = matrix_product(query, tl.trans(key).to(query.dtype), scores)
    if SCALED:
        scale_at = block.to(tl.int64) * scale_block_stride + head * BLOCK + places % BLOCK
        scores *= tl.load(k_scale + scale_at, mask=there, other=0.0).to(tl.float32)[None, :]
    if BIASES > 0:
        own = biases + head * (3 * BIASES)
        scores = add_biases(
            scores, query_at, owned, factor, own, cos, sin, places, there, WIDTH // 2, BIASES
        )
    log2 = scale_log2
    if SOFTCAP > 0:
        scores = soft_cap(scores * (scale_log2 / 1.4426950408889634), SOFTCAP)
        log2 = 1.4426950408889634
    if MASKED:
        seen = places[None, :] <= positions[:, None]
        if WINDOW != 0:
            seen &= places[None, :] >= first_seen(positions, WINDOW)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, 1) * log2)
    # A row of a windowed tile may have seen nothing yet: keep its exponents finite.
    safe = tl.where(top == float("-inf"), 0.0, top)
    # An explicit fma rounds once. The compiler would round scores under a mask twice and others
    # once, and the masked tiles depend on how the prompt was cut.
    weights = tl.exp2(tl.fma(scores, tl.full([ROWS, TILE], log2, tl.float32), -safe[:, None]))
    shrink = tl.exp2(best - safe)
    total = total * shrink + tl.sum(weights, 1)
    if SCALED:
        value_scale = tl.load(v_scale + scale_at, mask=there, other=0.0).to(tl.float32)
        if HALVES:
            value_scale = tl.minimum(value_scale * LIFT, HIGHEST)
        weights *= value_scale[None, :]
    if FOUR:
        bytes = tl.arange(0, WIDTH // 2)[None, :]
        value = tl.load(v + token[:, None] // 2 + bytes, mask=there[:, None], other=0)
        value = levels(value)
    else:
        if ACROSS:
            tokens = tokens_across(block, places, head, block_stride, head_stride, BLOCK)
            value = tl.load(
                v + tokens[:, None] + columns[None, :] * BLOCK,
                mask=held[:, None] & (columns < WIDTH)[None, :],
                other=0.0,
            )
        elif ROPE == 0:
            value = tl.load(v + token[:, None] + columns[None, :], mask=wanted, other=0.0)
        if HALVES:
            value = from_codes(value, INNER=True)
    output = matrix_product(
        weights.to(query.dtype), value.to(query.dtype), output * shrink[:, None]
    )
    return output, total, top


@triton.jit(do_not_specialize=["table_stride", "count_chunks", "tiles", "section"])
def _prefill_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    sinks,
    biases,
    cos,
    sin,
    tables,
    chunks,
    out,
    q_stride,
    out_stride,
    block_stride,
    head_stride,
    scale_block_stride,
    table_stride,
    count_chunks,
    tiles,
    section,
    scale_log2,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    HALVES: tl.constexpr,
    FOUR: tl.constexpr,
    ACROSS: tl.constexpr,
    BIASES: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Attend from one tile of rows. HALVES, FOUR, ACROSS, BIASES, ROPE: see
    `attention_decode._split_kernel`."""
    TOKENS: tl.constexpr = ROWS // GROUP
    # `section` KV heads side by side, the last tile of all first.
    number = tl.program_id(0)
    inside = number % (tiles * section)
    program = tiles - 1 - inside // section
    head = number // (tiles * section) * section + inside % section
    chunk = _find_chunk(chunks, program, count_chunks, TOKENS)
    # In a graph's list there may be none.
    if chunk < 0:
        return
    line = chunks + chunk * 8
    count = tl.load(line + 2)
    first = (program - (tl.load(line + 4) // TOKENS + chunk)) * TOKENS
    if first >= count:
        return
    entry = tl.load(line)
    first_row = tl.load(line + 1)
    length = tl.load(line + 3)
    start = length - count

    rows = tl.arange(0, ROWS)
    columns = ROPE + tl.arange(0, WIDTH_PADDED)
    token = first + rows // GROUP
    # ROWS need not be a multiple of GROUP: the rows left over are padding.
    owned = (token < count) & (rows < TOKENS * GROUP)
    real = owned[:, None] & (columns < WIDTH)[None, :]
    query_head = head * GROUP + rows % GROUP
    q_at = (first_row + token).to(tl.int64) * q_stride + query_head * WIDTH
    query = tl.load(q + q_at[:, None] + columns[None, :], mask=real, other=0.0)
    query_rope = query
    if ROPE > 0:
        query_rope = rotary_part(q + q_at, owned, ROPE)
    factor = 1.0
    if HALVES:
        query = scale_query(query, scale_log2)
        if ROPE > 0:
            query_rope = scale_query(query_rope, scale_log2)
        factor = scale_log2
        scale_log2 = 1.0
    # Padding rows repeat the last token: their softmax stays finite.
    positions = start + tl.minimum(token, count - 1)

    lowest = start + first
    highest = start + tl.minimum(first + TOKENS, count) - 1
    begin = 0
    if WINDOW != 0:
        begin = tl.maximum(first_seen(lowest, WINDOW), 0)
    tile_begin = begin // TILE * TILE
    # Tiles that every row sees whole: up to the first query's own place.
    clear_end = (lowest + 1) // TILE * TILE
    if WINDOW != 0:
        clear_end = tile_begin

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, WIDTH_PADDED], tl.float32)
    strides = block_stride, head_stride, scale_block_stride, table_stride
    kv = (k, v, k_scale, v_scale, tables, entry, head), strides
    biased = q, q_at, owned, factor, biases, cos, sin
    # Without a mask, then over the diagonal with one.
    for masked in tl.static_range(2):
        first_place = clear_end if masked else tile_begin
        for at in range(first_place, highest + 1 if masked else clear_end, TILE):
            output, total, best = _turn(
                query,
                query_rope,
                at,
                kv,
                biased,
                positions,
                begin,
                length,
                scale_log2,
                output,
                total,
                best,
                WIDTH,
                BLOCK,
                TILE,
                WINDOW,
                SOFTCAP,
                SCALED,
                HALVES,
                FOUR,
                ACROSS,
                BIASES,
                ROPE,
                masked == 1,
            )
    if HALVES:
        output *= 1.0 / LIFT
    if sinks is not None:
        total += sink_mass(sinks, query_head, best)
    out_at = (first_row + token).to(tl.int64) * out_stride + query_head * WIDTH
    output /= total[:, None]
    if FOUR:
        output = turn_back(output)
    result = output.to(out.dtype.element_ty)
    tl.store(out + out_at[:, None] + columns[None, :], result, mask=real)


def heads_beside(kv_heads: int, head_bytes: int) -> int:
    """Return how many KV heads of `head_bytes` each fit into L2 together; a divisor of
    `kv_heads`."""
    most = max(1, min(kv_heads, L2 // max(1, head_bytes)))
    return max(count for count in range(1, most + 1) if kv_heads % count == 0)


def attention_prefill(
    q: torch.Tensor,
    kv: KvLayer,
    plan: AttentionPlan,
    view: GroupBatch,
    out: torch.Tensor,
    scale: float,
    softcap: float | None,
    config: PrefillConfig,
    *,
    longest: int,
    sinks: torch.Tensor | None = None,
    rope: int = 0,
    chunked: bool = False,
) -> None:
    """Fill `out` [N, H, E] for the chunks of `plan`; rows of others are left alone. `longest`: most
    tokens of KV that a chunk reads. `sinks` [H]: see `Operators.attend`.

    Shapes, dtypes, `rope` and `chunked` as in `attention_decode`.
    """
    _, heads, width = q.shape
    kv_heads, block = kv.k.shape[1], kv.k.shape[2]
    chunks = tensor(plan.chunks)
    if not len(chunks):
        return
    if rope:
        kv_heads = head_tiles(heads)
    group = heads // kv_heads
    rows = max(16, config.rows, triton.next_power_of_2(group))
    tiles = plan.chunk_tokens // (rows // group) + len(chunks)
    k_scale, v_scale = (q, q) if kv.k_scale is None else (kv.k_scale, kv.v_scale)
    scaled, biased = kv.k_scale is not None, biases_of(kv, q)
    # With heads of 256 the sums take the registers: operands that are made there spill 39.
    halves = scaled and q.dtype != torch.float32 and width <= 128
    section = heads_beside(kv_heads, 2 * longest * width * kv.k.element_size())
    if rope:
        section = kv_heads  # They read the same latents.
    _prefill_kernel[(tiles * kv_heads,)](
        q,
        kv.k,
        kv.v,
        k_scale,
        v_scale,
        sinks,
        *biased[:3],
        view.tables,
        chunks,
        out,
        q.stride(0),
        out.stride(0),
        kv.k.stride(0),
        kv.k.stride(1),
        k_scale.stride(0),
        view.tables.stride(0),
        len(chunks),
        tiles,
        section,
        scale * LOG2E,
        GROUP=group,
        ROWS=rows,
        WIDTH=width,
        WIDTH_PADDED=max(16, triton.next_power_of_2(width - rope)),
        BLOCK=block,
        TILE=config.tile,
        WINDOW=(-1 if chunked else 1) * (view.window or 0),
        SOFTCAP=softcap or 0.0,
        SCALED=scaled,
        HALVES=halves,
        FOUR=kv.v.dtype == torch.uint8,
        ACROSS=kv.across,
        BIASES=biased[3],
        ROPE=rope,
        num_warps=config.warps,
        num_stages=config.stages,
        # With halves `log2` is one, and the compiler would fuse a key's scale with the subtraction
        # if no mask stands between them.
        enable_fp_fusion=not halves,
    )

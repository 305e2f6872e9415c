"""Paged attention for entries of few tokens: flash decoding, split along the KV.

Arithmetic. All query heads of a group read the same KV. So per entry and KV head the kernel moves 2
· L · E elements of K and V and does 4 · L · E · (H / G) operations a token. With bf16 KV that is 2
· H / G operations per byte, far below the ridge of any GPU (H200: 206). So bandwidth binds, and the
aim is to stream K and V once, from all multiprocessors. Entries that verify drafts have a few
tokens; they read the same KV and are far below the ridge, too.

Shape. One program takes one KV head and one *piece* of an entry's KV, from the host's list
(`attention_plan`): just as many as keep the device busy, for any lengths of the sequences. The
query rows of its H / G heads and of all tokens are packed into one tile (padded to 16, the tensor
cores' size), so K and V are read once per KV head. The last program of an entry and KV head to
finish (a counter) joins all of its pieces, in order, as in `product_skinny`. A second kernel would
take 3 of 120 microseconds at 32 x 4k and a fifth of the operator at one row. A piece's length
depends on the step, so a row's rounding depends on the step's other rows (the deterministic mode
has one kernel for all entries instead).

Codes. An 8-bit cache halves the bytes, and then instructions bind: at 4.8 TB/s each of an H200's
528 schedulers has 790 slots for 4 KiB. Widened to bf16 the loop took 1,068 and 128 conversions at
an eighth of the rate; as fp16 (`quantise.from_codes`) it takes 360 (machine code of sm_90). Keys
become fp16 after the exchange of operands, so that only their codes pass through it (ADR 0031).

Codes first. A cache in e4m3 stores the tokens of a block's values contiguously (`KvLayer.across`),
as Hopper's instruction requires along the summed dimension. So keys, and transposed values, are the
first sides of two products without any conversion. The second sides, the query and the weights, are
two terms of e4m3 each (`two_terms`). Both fill the 16 columns that eight rows would leave half
empty, and together have eight digits, as bf16 has. The scale of a value is in the exponent of its
weight, so that the largest product of both is one, for any scales.

Latents. In latent attention all H heads share one key of 64 + 512 numbers, whose latent is the
value too: 1,152 bytes a token in bf16 and 2,176 · H operations, 30 operations a byte with the 16
heads of DeepSeek-V2-Lite (bandwidth binds), 242 with the 128 of V3, at the ridge. Heads fill the
tile; more than `LATENT_HEADS` are several tiles, which read the same latents, the second time from
L2. Each is loaded once and multiplied twice. Sums are four times as wide as those of other heads,
so a separate kernel joins their pieces (`attention_join`): the last program to finish would have to
read 64 of them in sequence.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..arrays import tensor
from ..attention_plan import SHORTEST, AttentionPlan
from ..operators import GroupBatch, KvLayer
from .attention_join import join_pieces, leave_piece
from .kv_codes import add_biases, biases_of, levels, turn_back
from .quantise import (
    HIGHEST,
    LIFT,
    LIFT_LOG2,
    from_codes,
    join_terms,
    pair_terms,
    scale_query,
    two_terms,
)
from .support import LOG2E, few_product, first_seen, matrix_product, sink_mass, soft_cap

CUT = tl.constexpr(SHORTEST)
ROTARY = tl.constexpr(64)
"""Room for the rotated part of a latent key."""
LATENT_HEADS = 64
"""Most heads of a tile over latents: sums of 64 x 512 are 128 registers of eight warps."""
TOGETHER = 4096
"""Values of partial results that are joined in one turn, all on their way at once: 32 a
thread. With twice as many Triton 3.6 gives the whole kernel 152 registers, not 128."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Cut of a decode launch."""

    tile: int = 64
    """Tokens per turn of the inner loop; divides `attention_plan.SHORTEST`."""
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    """Most registers of a thread, for one token and KV in 16 bits without a soft cap; None: the
    compiler's choice."""
    ahead: bool = False
    """Whether a turn's scales of 8-bit codes are requested in the turn before."""


@triton.jit
def rotary_part(at, real, ROPE: tl.constexpr):
    """Load the first ROPE numbers at each of the places `at` [ROWS] that are `real`."""
    columns = tl.arange(0, ROTARY)
    mask = real[:, None] & (columns < ROPE)[None, :]
    return tl.load(at[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def tokens_across(block, places, head, block_stride, head_stride, BLOCK: tl.constexpr):
    """Return where the first numbers of the values at `places` lie: see `KvLayer.across`. `block`
    has one number for all places of a block."""
    RUN: tl.constexpr = 16 if BLOCK % 16 == 0 else 1
    at = block.to(tl.int64) * block_stride + head * head_stride + places % BLOCK
    return tl.max_contiguous(tl.multiple_of(at, RUN), RUN)


@triton.jit
def _scales(k_scale, v_scale, block, places, seen, head, scale_block_stride, BLOCK: tl.constexpr):
    """Load the scales of the keys and of the values at `places`, both at once."""
    at = block.to(tl.int64) * scale_block_stride + head * BLOCK + places % BLOCK
    keys = tl.load(k_scale + at, mask=seen, other=0.0)
    return keys, tl.load(v_scale + at, mask=seen, other=0.0)


@triton.jit
def _values(
    v,
    at,
    columns,
    seen,
    held,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    FOUR: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Load the values of a tile [TILE, WIDTH], or [WIDTH, TILE] if ACROSS: codes of 8 bits as they
    are, those of four bits as levels. `at`: addresses, then what they are made of."""
    if ACROSS:
        # Of whole blocks, whose bytes are copied sixteen at a time: weights of others are zero.
        tokens = tokens_across(at[1], at[2], at[3], at[4], at[5], BLOCK)
        mask = (columns < WIDTH)[:, None] & held[None, :]
        value = tl.load(v + columns[:, None] * BLOCK + tokens[None, :], mask=mask, other=0.0)
    elif FOUR:
        bytes = at[0][:, None] // 2 + tl.arange(0, WIDTH // 2)[None, :]
        value = levels(tl.load(v + bytes, mask=seen[:, None], other=0))
    else:
        mask = seen[:, None] & (columns < WIDTH)[None, :]
        value = tl.load(v + at[0][:, None] + columns[None, :], mask=mask, other=0.0)
    return value


@triton.jit
def _first_product(codes, second):
    """Multiply e4m3 codes [M, K] by two terms [K, 2 · R], or by fp32 [R, K] of which they are made
    → [M, R]."""
    if second.dtype == tl.float32:
        second = pair_terms(second)
    sums = tl.zeros([codes.shape[0], second.shape[1]], tl.float32)
    return join_terms(matrix_product(codes, second, sums))


@triton.jit
def _log2(scale):
    """Return the logarithm of scales, of which none counts as zero."""
    return tl.log2(tl.maximum(scale.to(tl.float32), 7.9e-31))


@triton.jit
def _lifted(scale, HALVES: tl.constexpr):
    """Return the scales of values as weights are multiplied with them."""
    scale = scale.to(tl.float32)
    return tl.minimum(scale * LIFT, HIGHEST) if HALVES else scale


@triton.jit(do_not_specialize=["table_stride"])
def _split_kernel(
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
    pieces,
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
    scale_log2,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr,
    HALVES: tl.constexpr,
    ACROSS: tl.constexpr,
    AHEAD: tl.constexpr,
    PADDED: tl.constexpr,
    JOINED: tl.constexpr,
    FOUR: tl.constexpr,
    BIASES: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Attend over one piece. HALVES: codes are multiplied as fp16, with `scale` in the query
    already. ACROSS: see `KvLayer.across`; codes are the first sides of both products then. FOUR:
    values in four bits. BIASES: of keys, see `add_biases`. ROPE: numbers of a key over latents that
    are rotated and precede its value; `head` is a tile of heads then, and there is one KV head."""
    FIRST: tl.constexpr = ACROSS and HALVES and WIDTH_PADDED >= 32
    head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    kv_head = 0 if ROPE > 0 else head
    number = tl.program_id(1)
    # Columns: see `attention_plan.COLUMNS`.
    line = pieces + number * 8
    parts = tl.load(line + 7)
    if parts == 0:
        return
    entry = tl.load(line)
    first_row = tl.load(line + 1)
    count = tl.load(line + 2)
    length = tl.load(line + 3)
    # A product, by which the compiler knows that tiles begin with a block: 128 registers, not 166.
    low = tl.load(line + 4) * CUT
    high = tl.load(line + 5)

    rows = tl.arange(0, ROWS)
    columns = ROPE + tl.arange(0, WIDTH_PADDED)
    if TOKENS == 1:
        count = 1
    real = (rows < count * GROUP)[:, None] & (columns < WIDTH)[None, :]
    q_at = q + first_row.to(tl.int64) * q_stride + head * GROUP * WIDTH
    place = rows * WIDTH
    if TOKENS > 1:
        place = rows // GROUP * q_stride + rows % GROUP * WIDTH
    query = tl.load(q_at + place[:, None] + columns[None, :], mask=real, other=0.0)
    if ROPE > 0:
        query_rope = rotary_part(q_at + place, rows < count * GROUP, ROPE)
    # Padding rows repeat the last token: their softmax stays finite.
    position = length - count + tl.minimum(rows // GROUP, count - 1)
    begin = 0
    if WINDOW != 0:
        begin = tl.maximum(first_seen(length - count, WINDOW), 0)

    factor = 1.0
    if FIRST:
        terms, back = two_terms(query.to(tl.float32) * scale_log2)
    if HALVES:
        query = scale_query(query, scale_log2)
        if ROPE > 0:
            query_rope = scale_query(query_rope, scale_log2)
        factor = scale_log2
        scale_log2 = 1.0

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([WIDTH_PADDED, ROWS] if FIRST else [ROWS, WIDTH_PADDED], tl.float32)
    # Whole tiles before the window are skipped; the first one that matters is masked.
    start = low + tl.maximum(begin - low, 0) // TILE * TILE
    row = tables + entry * table_stride
    if SCALED and AHEAD:
        then = start + tl.arange(0, TILE)
        seen = (then < high) & (then >= begin)
        ahead = tl.load(row + then // BLOCK, mask=seen, other=0)
        next_scales = _scales(
            k_scale, v_scale, ahead, then, seen, kv_head, scale_block_stride, BLOCK
        )
        ahead = tl.load(row + (then + TILE) // BLOCK, mask=then + TILE < high, other=0)
    for at in range(start, high, TILE):
        places = at + tl.arange(0, TILE)
        seen = (places < high) & (places >= begin)
        held = places // BLOCK * BLOCK < high if ACROSS else seen
        block = tl.load(row + places // BLOCK, mask=held, other=0)
        token = block.to(tl.int64) * block_stride + kv_head * head_stride + (places % BLOCK) * WIDTH
        wanted = seen[:, None] & (columns < WIDTH)[None, :]
        if SCALED and AHEAD:
            scales, then = next_scales, places + TILE
            next_scales = _scales(
                k_scale, v_scale, ahead, then, then < high, kv_head, scale_block_stride, BLOCK
            )
            ahead = tl.load(row + (then + TILE) // BLOCK, mask=then + TILE < high, other=0)
        elif SCALED:
            scales = _scales(
                k_scale, v_scale, block, places, seen, kv_head, scale_block_stride, BLOCK
            )
        key = tl.load(k + token[:, None] + columns[None, :], mask=wanted, other=0.0)
        value = key
        if ROPE == 0:
            at_value = (token, block, places, kv_head, block_stride, head_stride)
            value = _values(v, at_value, columns, seen, held, WIDTH, BLOCK, FOUR, ACROSS)
        if HALVES and not FIRST:
            key = from_codes(key, INNER=True)
            if not FOUR:
                value = from_codes(value, INNER=ACROSS)
        scores = tl.zeros([ROWS, TILE], tl.float32)
        if ROPE > 0:
            key_rope = rotary_part(k + token, seen, ROPE)
            if HALVES:
                key_rope = from_codes(key_rope, INNER=True)
            key_rope = tl.trans(key_rope).to(query.dtype)
            scores = few_product(query_rope, key_rope, scores)
        if FIRST:
            scores = tl.trans(_first_product(key, terms)) * back[:, None]
        else:
            scores = few_product(query, tl.trans(key).to(query.dtype), scores)
        if SCALED:
            scores *= scales[0].to(tl.float32)[None, :]
        if BIASES > 0:
            own = biases + head * (3 * BIASES)
            owned = rows < count * GROUP
            scores = add_biases(
                scores, q_at + place, owned, factor, own, cos, sin, places, seen, WIDTH // 2, BIASES
            )
        if SOFTCAP > 0:
            scores = soft_cap(scores * (scale_log2 / 1.4426950408889634), SOFTCAP)
            scores *= 1.4426950408889634
        else:
            scores *= scale_log2
        if TOKENS > 1:
            visible = places[None, :] <= position[:, None]
            if WINDOW != 0:
                visible &= places[None, :] >= first_seen(position, WINDOW)[:, None]
            scores = tl.where(visible & seen[None, :], scores, float("-inf"))
        else:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        heavy = scores + _log2(scales[1])[None, :] if FIRST else scores
        top = tl.maximum(best, tl.max(heavy, 1))
        safe = top
        if TOKENS > 1:
            # A token may see nothing of a tile, or of a piece: keep its exponents finite.
            safe = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        if FIRST:
            lifted = tl.exp2(heavy - (safe - LIFT_LOG2)[:, None])
            output = output * shrink[None, :] + _first_product(value, lifted)
        else:
            if SCALED:
                weights *= _lifted(scales[1], HALVES)[None, :]
            value = (tl.trans(value) if ACROSS else value).to(query.dtype)
            output *= shrink[:, None]
            output = few_product(weights.to(query.dtype), value, output)
        best = top

    output = tl.trans(output) if FIRST else output
    if HALVES:
        output *= 1.0 / LIFT
    out_at = out + first_row.to(tl.int64) * out_stride + head * GROUP * WIDTH
    if parts == 1:
        if sinks is not None:
            total += sink_mass(sinks, head * GROUP + rows % GROUP, best)
        output /= total[:, None]
        if FOUR:
            output = turn_back(output)
        finished = output.to(out.dtype.element_ty)
        place = rows * WIDTH
        if TOKENS > 1:
            place = rows // GROUP * out_stride + rows % GROUP * WIDTH
        tl.store(out_at + place[:, None] + columns[None, :], finished, mask=real)
    else:
        part = tl.load(line + 6)  # Not before the loop: Triton 3.6 spills there.
        leave_piece(
            (partial, log_sums, tickets, sinks, out_at),
            out_stride,
            (output, best, total),
            (number, part, parts, entry),
            head,
            kv_heads,
            count,
            real,
            GROUP,
            TOKENS * GROUP,
            ROWS,
            PADDED,
            WIDTH,
            WIDTH_PADDED,
            JOINED,
            FOUR,
            ROPE,
        )


def attention_decode(
    q: torch.Tensor,
    kv: KvLayer,
    plan: AttentionPlan,
    group_number: int,
    view: GroupBatch,
    out: torch.Tensor,
    scale: float,
    softcap: float | None,
    config: DecodeConfig,
    tickets: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    rope: int = 0,
    chunked: bool = False,
) -> None:
    """Fill `out` [N, H, E] for the entries that `plan` cuts into pieces; rows of others are
    unchanged. `rope`: the count of rotated numbers at the start of a key over latents; these
    columns of the result are unchanged, too. `group_number`: the group whose pieces are used.
    `sinks` [H]: see `Operators.attend`. `chunked`: windows are chunks.

    `tickets` [entries · G or more] int32: zero before and after, see `split.make_tickets`.

    q [N, H, E] in bf16, fp16 or fp32; KV in q's dtype, or fp8 / int8 codes with scales; V in four
    bits [blocks, G, S, E / 2], where E is a power of two. H is a multiple of G. Nothing is read
    back: safe inside a CUDA graph whose list has the same length.
    """
    _, heads, width = q.shape
    kv_heads, block = kv.k.shape[1], kv.k.shape[2]
    if rope:
        assert rope <= 64
        assert sinks is None
        kv_heads = head_tiles(heads)
    pieces = tensor(plan.pieces[group_number])
    group, count = heads // kv_heads, len(pieces)
    if not count:
        return
    tokens = triton.next_power_of_2(plan.widest)
    packed = group * tokens
    partial = torch.empty(count, kv_heads, packed, width, dtype=torch.float32, device=q.device)
    log_sums = torch.empty(count, kv_heads, packed, 2, dtype=torch.float32, device=q.device)
    k_scale, v_scale = (q, q) if kv.k_scale is None else (kv.k_scale, kv.v_scale)
    scaled, four = kv.k_scale is not None, kv.v.dtype == torch.uint8
    biased = biases_of(kv, q)
    padded = max(16, triton.next_power_of_2(width - rope))
    # A product follows values in four bits, and it takes eight rows at least.
    rows_padded = max(8 if four else 1, triton.next_power_of_2(packed))
    entries = len(view.tables)
    assert entries * kv_heads <= len(tickets), f"{entries} entries of {kv_heads} heads"
    short = rows_padded <= 16 and tokens == 1 and not scaled and softcap is None
    _split_kernel[(kv_heads, count)](
        q,
        kv.k,
        kv.v,
        k_scale,
        v_scale,
        sinks,
        *biased[:3],
        view.tables,
        pieces,
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
        scale * LOG2E,
        GROUP=group,
        TOKENS=tokens,
        ROWS=max(8, rows_padded),
        WIDTH=width,
        WIDTH_PADDED=padded,
        BLOCK=block,
        TILE=config.tile,
        WINDOW=(-1 if chunked else 1) * (view.window or 0),
        SOFTCAP=softcap or 0.0,
        SCALED=scaled,
        HALVES=scaled and q.dtype != torch.float32,
        ACROSS=kv.across,
        AHEAD=config.ahead,
        PADDED=rows_padded,
        JOINED=max(1, TOGETHER // (rows_padded * padded)),
        FOUR=four,
        BIASES=biased[3],
        ROPE=rope,
        num_warps=config.warps,
        num_stages=config.stages,
        maxnreg=config.registers if short and q.dtype != torch.float32 else None,
    )
    if rope:
        join_pieces(partial, log_sums, pieces, out, group, rope)


def head_tiles(heads: int) -> int:
    """Return the number of tiles, all of one size up to `LATENT_HEADS`, for heads over latents."""
    return next(n for n in range(-(-heads // LATENT_HEADS), heads + 1) if heads % n == 0)

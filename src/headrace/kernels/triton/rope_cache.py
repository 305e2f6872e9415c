"""Norm per head, rotation and KV write in one pass over q, k and v.

Arithmetic: each of the (H + 2G) · E values of a token is read once and written once (4 bytes an
element in bf16); cos and sin come from L2. Bandwidth binds; unfused, the same work would read and
write q and k three times. One program per token and up to eight heads of one kind. A program per
head would be 393,000 programs for a prompt of 8,192 tokens of an 8B, whose start takes longer than
their bytes. Heads are independent, and the number per program is the same in every step, so nothing
depends on the batch.

A program holds its heads as pairs of numbers with one angle: (i, i + half), or neighbours.
Unrotated numbers, of heads that are rotated in part or not at all, are pairs with angle zero. A
norm over all heads of a token (OLMo 2) reads all of them in each program: they are in L2, and the
number per program is the model's. If values are the keys (Gemma 4), programs of values read those.
If K and V belong to another layer, neither has programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...base.graph import AttentionSpec
from ..operators import KvLayer, StepBatch
from ..prepared import RopeTable
from .kv_codes import biases_of, leave_out, quantise_levels
from .quantise import to_codes

TOGETHER = 8
"""Heads per program: 1,024 values of E 128, eight a thread."""


@triton.jit
def _store_kv(
    cache,
    cache_scale,
    pairs,
    where,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    FOUR: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Store both numbers of each of the `pairs` of heads [HEADS], which lie at `left` and `right`,
    in their token's slot; as codes with a scale for each if TOP > 0, in four bits if FOUR.
    ACROSS: see `KvLayer.across`."""
    low, high, left, right, real, mask = pairs
    slot, head, block_stride, head_stride, scale_block_stride = where
    block = slot // BLOCK
    offset = slot % BLOCK
    if FOUR:
        codes, scale = quantise_levels(low, high, 2 * HALF)
        scale_at = cache_scale + block * scale_block_stride + head * BLOCK + offset
        tl.store(scale_at, scale.to(tl.bfloat16), mask=real)
        at = cache + block * (block_stride // 2) + head[:, None] * (head_stride // 2)
        tl.store(at + offset * HALF + left[None, :], codes, mask=mask)
    elif TOP > 0:
        peak = tl.maximum(
            tl.max(tl.where(mask, tl.abs(low), 0.0), 1),
            tl.max(tl.where(mask, tl.abs(high), 0.0), 1),
        )
        # Rounded to nearest: `/` may be one bit above, and the next bf16 would be another scale.
        scale = tl.maximum(tl.div_rn(peak, TOP), 1.1754943508222875e-38)
        scale_at = cache_scale + block * scale_block_stride + head * BLOCK + offset
        # Up to the next bf16: no code is clipped.
        above = (scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000
        scale = above.to(tl.float32, bitcast=True)
        tl.store(scale_at, scale.to(tl.bfloat16), mask=real)
        low = to_codes(low / scale[:, None], cache.dtype.element_ty, TOP)
        high = to_codes(high / scale[:, None], cache.dtype.element_ty, TOP)
    if not FOUR:
        ALONG: tl.constexpr = BLOCK if ACROSS else 1
        at = cache + block * block_stride + head[:, None] * head_stride
        at += offset * (1 if ACROSS else 2 * HALF)
        tl.store(at + left[None, :] * ALONG, low.to(cache.dtype.element_ty), mask=mask)
        tl.store(at + right[None, :] * ALONG, high.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _to_one(low, high, eps, HALF: tl.constexpr):
    """Return the factor that scales heads, given as pairs [HEADS, HALF_PADDED], to a root mean
    square of one."""
    mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
    return (1.0 / tl.sqrt(mean + eps))[:, None]


@triton.jit
def _rope_kernel(
    qkv,
    q_out,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    biases,
    q_norm,
    k_norm,
    cos,
    sin,
    positions,
    slots,
    heads,
    kv_heads,
    block_stride,
    head_stride,
    scale_block_stride,
    eps,
    norm_offset,
    growth,
    READ: tl.constexpr,
    WRITTEN: tl.constexpr,
    TO_ONE: tl.constexpr,
    BEHIND: tl.constexpr,
    EVERY: tl.constexpr,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    TURNED: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    WHOLE: tl.constexpr,
    TOP: tl.constexpr,
    FOUR: tl.constexpr,
    ACROSS: tl.constexpr,
    BIASES: tl.constexpr,
):
    """Norm, rotate and store a token's heads. READ, WRITTEN: counts of key and value arrays that
    follow the queries, and that are kept. TO_ONE: values are scaled to a root mean square of one;
    BEHIND: q and k are, after the rotation. EVERY: positions by which queries grow. TURNED: rotated
    pairs of a head; PAIRS: they are neighbours. NORM: over each head, or over all if WHOLE."""
    token = tl.program_id(0).to(tl.int64)
    # Programs of queries come first, then those of keys and of values.
    queries = tl.cdiv(heads, HEADS)
    each = tl.cdiv(kv_heads, HEADS)
    number = tl.program_id(1)
    is_query = number < queries
    is_value = number >= queries + each
    own = number * HEADS
    before = 0
    count = heads
    if not is_query:
        own = (number - queries) % each * HEADS
        before = heads
        count = kv_heads
    if is_value:
        before = heads + (READ - 1) * kv_heads
    head = own + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF_PADDED)
    real = head < count
    inside = columns < HALF
    mask = real[:, None] & inside[None, :]
    first = token * (heads + READ * kv_heads) + before
    # Where in a head both numbers of each pair are; values in four bits are coded by halves.
    left = columns
    right = HALF + columns
    if PAIRS:
        left = tl.where(is_value, left, 2 * columns)
        right = tl.where(is_value, right, 2 * columns + 1)
    elif TURNED > 0 and TURNED < HALF:
        left = tl.where(is_value | (columns < TURNED), left, columns + TURNED)
        right = tl.where(is_value | (columns >= TURNED), right, columns + TURNED)
    at = qkv + (first + head)[:, None] * (2 * HALF)
    low = tl.load(at + left[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + right[None, :], mask=mask, other=0.0).to(tl.float32)
    if is_value:
        if TO_ONE:
            factor = _to_one(low, high, eps, HALF)
            low *= factor
            high *= factor
    else:
        norm = k_norm
        if is_query:
            norm = q_norm
        if NORM:
            if WHOLE:
                squares = tl.zeros([HEADS], tl.float32)
                for others in range(0, count, HEADS):
                    other = others + tl.arange(0, HEADS)
                    there = (other < count)[:, None] & inside[None, :]
                    every = qkv + (first + other)[:, None] * (2 * HALF) + columns[None, :]
                    x = tl.load(every, mask=there, other=0.0).to(tl.float32)
                    y = tl.load(every + HALF, mask=there, other=0.0).to(tl.float32)
                    squares += tl.sum(x * x, 1) + tl.sum(y * y, 1)
                factor = 1.0 / tl.sqrt(tl.sum(squares, 0) / (count * (2 * HALF)) + eps)
                gain = norm + head[:, None] * (2 * HALF)
                gain_low = tl.load(gain + left[None, :], mask=mask, other=0.0)
                gain_high = tl.load(gain + right[None, :], mask=mask, other=0.0)
            else:
                factor = _to_one(low, high, eps, HALF)
                gain_low = tl.load(norm + left, mask=inside, other=0.0)[None, :]
                gain_high = tl.load(norm + right, mask=inside, other=0.0)[None, :]
            gain_low = gain_low.to(tl.float32) + norm_offset
            gain_high = gain_high.to(tl.float32) + norm_offset
            # Rounded as the reference does, so that both rotate the same values.
            low = (low * factor * gain_low).to(qkv.dtype.element_ty)
            high = (high * factor * gain_high).to(qkv.dtype.element_ty)
            low = low.to(tl.float32)
            high = high.to(tl.float32)
        if BIASES > 0 and not is_query:
            low, high = leave_out(low, high, biases, head, columns, real, BIASES)
        if TURNED > 0:
            angle = tl.load(positions + token) * TURNED + columns
            c = tl.load(cos + angle, mask=columns < TURNED, other=1.0)[None, :]
            s = tl.load(sin + angle, mask=columns < TURNED, other=0.0)[None, :]
            turned = low * c - high * s
            high = high * c + low * s
            low = turned
        if BEHIND:
            low = low.to(qkv.dtype.element_ty).to(tl.float32)
            high = high.to(qkv.dtype.element_ty).to(tl.float32)
            factor = _to_one(low, high, eps, HALF)
            low *= factor
            high *= factor
        if EVERY > 0 and is_query:
            steps = (tl.load(positions + token) + FIRST) // EVERY
            larger = (tl.log(1.0 + steps.to(tl.float32)) * growth + 1.0).to(qkv.dtype.element_ty)
            low = low.to(qkv.dtype.element_ty).to(tl.float32) * larger.to(tl.float32)
            high = high.to(qkv.dtype.element_ty).to(tl.float32) * larger.to(tl.float32)
    if is_query:
        to = q_out + (token * heads + head)[:, None] * (2 * HALF)
        tl.store(to + left[None, :], low.to(q_out.dtype.element_ty), mask=mask)
        tl.store(to + right[None, :], high.to(q_out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + token)
        # Rounded to the model's dtype before it is quantised, as the reference does.
        low = low.to(qkv.dtype.element_ty).to(tl.float32)
        high = high.to(qkv.dtype.element_ty).to(tl.float32)
        pairs = low, high, left, right, real, mask
        where = slot, head, block_stride, head_stride, scale_block_stride
        if is_value:
            _store_kv(v_cache, v_scale, pairs, where, HALF, BLOCK, TOP, FOUR, ACROSS)
        else:
            _store_kv(k_cache, k_scale, pairs, where, HALF, BLOCK, TOP, False, False)


def rope_and_cache(
    qkv: torch.Tensor,
    spec: AttentionSpec,
    norms: Sequence[torch.Tensor],
    rope: RopeTable | None,
    kv: KvLayer,
    batch: StepBatch,
    group: int,
) -> torch.Tensor:
    """Compute `Operators.write`: qkv [N, `spec.stacked`] → q [N, H · E]; latents are keys of one
    head that are values too. E is even. Only heads whose halves are rotated may leave biases out of
    their keys."""
    heads, kv_heads, width, tokens = spec.heads, spec.kv_heads, spec.size, len(qkv)
    out = torch.empty(tokens, spec.queries, dtype=qkv.dtype, device=qkv.device)
    coded = kv.k_scale is not None
    top = (127.0 if kv.k.dtype == torch.int8 else 448.0) if coded else 0.0
    k_scale, v_scale = (qkv, qkv) if kv.k_scale is None else (kv.k_scale, kv.v_scale)
    q_norm, k_norm = (norms[0], norms[-1]) if norms else (qkv, qkv)
    four, biased = kv.v.dtype == torch.uint8, biases_of(kv, qkv)
    assert kv.k.stride(0) == kv.v.stride(0) * (1 + four)
    assert qkv.is_contiguous()
    together = min(TOGETHER, triton.next_power_of_2(heads))
    written = 2 if spec.values == "keys" else spec.kept
    programs = triton.cdiv(heads, together) + written * triton.cdiv(kv_heads, together)
    growth, every, first = spec.growth or (0.0, 0, 0)
    cos, sin = (qkv, qkv) if rope is None else (rope.cos, rope.sin)
    positions = batch.positions
    if spec.rope is not None and spec.rope.axes and batch.turns is not None:
        assert spec.growth is None, "queries grow with their position"
        axes = torch.tensor(spec.rope.axes, device=qkv.device)
        pairs = torch.arange(len(axes), device=qkv.device)
        places = batch.turns[axes].T
        cos, sin = (table[places, pairs].contiguous() for table in (cos, sin))
        positions = torch.arange(tokens, device=qkv.device)
    _rope_kernel[(tokens, programs)](
        qkv,
        out,
        kv.k,
        kv.v,
        k_scale,
        v_scale,
        biased[0],
        q_norm,
        k_norm,
        cos,
        sin,
        positions,
        batch.groups[group].slots,
        heads,
        kv_heads,
        kv.k.stride(0),
        kv.k.stride(1),
        k_scale.stride(0),
        spec.eps,
        spec.norm_offset,
        growth,
        READ=spec.kept,
        WRITTEN=written,
        TO_ONE=spec.values in ("normed", "keys"),
        BEHIND=spec.behind,
        EVERY=every,
        FIRST=first,
        HALF=width // 2,
        HALF_PADDED=triton.next_power_of_2(width // 2),
        TURNED=0 if rope is None else rope.cos.shape[1],
        PAIRS=spec.rope is not None and spec.rope.interleaved,
        HEADS=together,
        BLOCK=kv.block_size,
        NORM=bool(norms),
        WHOLE=spec.whole_norm,
        TOP=top,
        FOUR=four,
        ACROSS=kv.across,
        BIASES=biased[3],
        num_warps=4,
    )
    return out

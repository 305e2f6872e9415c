"""Norm per head, rotation and KV write in one pass over q, k and v.

Arithmetic: each of the (H + 2G) · E values of a token is read once and written once (4 bytes an
element in bf16); cos and sin come from L2. Bandwidth binds; unfused, the same work would read and
write q and k three times. One program per token and up to eight heads of one kind: a program for
each head was 393,000 of them for a prompt of 8,192 tokens of an 8B, and starting them took longer
than their bytes. Heads are independent, and as many share a program in every step, so nothing
depends on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...base.graph import AttentionSpec
from ..operators import KvLayer, StepBatch
from ..prepared import RopeTable
from .kv_codes import biases_of, leave_out, quantise_levels
from .quantise import to_codes
from .support import INTERPRETED

TOGETHER = 8
"""Heads of a program: 1,024 values of E 128, eight a thread."""


@triton.jit
def _store_kv(
    cache,
    cache_scale,
    low,
    high,
    slot,
    head,
    block_stride,
    head_stride,
    scale_block_stride,
    half_columns,
    real,
    mask,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    FOUR: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Both halves of the vectors of heads `head` [HEADS] to their token's slot; as codes with a
    scale for each where TOP > 0, of four bits where FOUR."""
    block = slot // BLOCK
    offset = slot % BLOCK
    if FOUR:
        codes, scale = quantise_levels(low, high, 2 * HALF)
        scale_at = cache_scale + block * scale_block_stride + head * BLOCK + offset
        tl.store(scale_at, scale.to(tl.bfloat16), mask=real)
        at = cache + block * (block_stride // 2) + head[:, None] * (head_stride // 2)
        tl.store(at + offset * HALF + half_columns[None, :], codes, mask=mask)
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
        low = to_codes(low / scale[:, None], cache.dtype.element_ty, TOP, INTERPRET)
        high = to_codes(high / scale[:, None], cache.dtype.element_ty, TOP, INTERPRET)
    if not FOUR:
        at = cache + block * block_stride + head[:, None] * head_stride + offset * (2 * HALF)
        at += half_columns[None, :]
        tl.store(at, low.to(cache.dtype.element_ty), mask=mask)
        tl.store(at + HALF, high.to(cache.dtype.element_ty), mask=mask)


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
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    TOP: tl.constexpr,
    FOUR: tl.constexpr,
    BIASES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
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
        before = heads + kv_heads
    head = own + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF_PADDED)
    real = head < count
    inside = columns < HALF
    mask = real[:, None] & inside[None, :]
    first = token * (heads + 2 * kv_heads) + before
    at = qkv + (first + head)[:, None] * (2 * HALF) + columns[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if not is_value:
        norm = k_norm
        if is_query:
            norm = q_norm
        if (Q_NORM and is_query) or (K_NORM and not is_query):
            mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF)
            factor = (1.0 / tl.sqrt(mean + eps))[:, None]
            gain_low = tl.load(norm + columns, mask=inside, other=0.0).to(tl.float32)
            gain_high = tl.load(norm + HALF + columns, mask=inside, other=0.0).to(tl.float32)
            # Rounded as the reference does, so that both rotate the same values.
            low = (low * factor * (gain_low + norm_offset)[None, :]).to(qkv.dtype.element_ty)
            high = (high * factor * (gain_high + norm_offset)[None, :]).to(qkv.dtype.element_ty)
            low = low.to(tl.float32)
            high = high.to(tl.float32)
        if BIASES > 0 and not is_query:
            low, high = leave_out(low, high, biases, head, columns, real, BIASES)
        position = tl.load(positions + token)
        angle = position * HALF + columns
        c = tl.load(cos + angle, mask=inside, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=inside, other=0.0)[None, :]
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    if is_query:
        to = q_out + (token * heads + head)[:, None] * (2 * HALF) + columns[None, :]
        tl.store(to, low.to(q_out.dtype.element_ty), mask=mask)
        tl.store(to + HALF, high.to(q_out.dtype.element_ty), mask=mask)
    else:
        slot = tl.load(slots + token)
        # Rounded to the model's dtype before it is quantised, as the reference does.
        low = low.to(qkv.dtype.element_ty).to(tl.float32)
        high = high.to(qkv.dtype.element_ty).to(tl.float32)
        if is_value:
            _store_kv(
                v_cache,
                v_scale,
                low,
                high,
                slot,
                head,
                block_stride,
                head_stride,
                scale_block_stride,
                columns,
                real,
                mask,
                HALF,
                BLOCK,
                TOP,
                FOUR,
                INTERPRET,
            )
        else:
            _store_kv(
                k_cache,
                k_scale,
                low,
                high,
                slot,
                head,
                block_stride,
                head_stride,
                scale_block_stride,
                columns,
                real,
                mask,
                HALF,
                BLOCK,
                TOP,
                False,
                INTERPRET,
            )


def rope_and_cache(
    qkv: torch.Tensor,
    spec: AttentionSpec,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    rope: RopeTable,
    kv: KvLayer,
    batch: StepBatch,
    group: int,
) -> torch.Tensor:
    """See `Operators.write`: qkv [N, (H + 2G) · E] → q [N, H · E]."""
    heads, kv_heads, width, tokens = spec.heads, spec.kv_heads, spec.size, len(qkv)
    out = torch.empty(tokens, spec.queries, dtype=qkv.dtype, device=qkv.device)
    coded = kv.k_scale is not None
    top = (127.0 if kv.k.dtype == torch.int8 else 448.0) if coded else 0.0
    k_scale, v_scale = (qkv, qkv) if kv.k_scale is None else (kv.k_scale, kv.v_scale)
    q_norm, k_norm = norms or (qkv, qkv)
    four, biased = kv.v.dtype == torch.uint8, biases_of(kv, qkv)
    assert kv.k.stride(0) == kv.v.stride(0) * (1 + four)
    assert qkv.is_contiguous()
    together = min(TOGETHER, triton.next_power_of_2(heads))
    programs = triton.cdiv(heads, together) + 2 * triton.cdiv(kv_heads, together)
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
        rope.cos,
        rope.sin,
        batch.positions,
        batch.groups[group].slots,
        heads,
        kv_heads,
        kv.k.stride(0),
        kv.k.stride(1),
        k_scale.stride(0),
        spec.eps,
        spec.norm_offset,
        HALF=width // 2,
        HALF_PADDED=triton.next_power_of_2(width // 2),
        HEADS=together,
        BLOCK=kv.block_size,
        Q_NORM=norms is not None,
        K_NORM=norms is not None,
        TOP=top,
        FOUR=four,
        BIASES=biased[3],
        INTERPRET=INTERPRETED,
        num_warps=4,
    )
    return out

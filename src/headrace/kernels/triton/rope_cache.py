"""Norm per head, rotation and KV write in one pass over q, k and v.

Arithmetic: each of the (H + 2G) · E values of a token is read once and written once (4 bytes an
element in bf16); cos and sin come from L2. Bandwidth binds; unfused, the same work would read and
write q and k three times. One program per token and head: heads are independent, so nothing
depends on the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...base.graph import AttentionSpec
from ..operators import KvLayer, StepBatch
from ..prepared import RopeTable
from .early import launch_options, wait_for_inputs
from .quantise import to_codes
from .support import INTERPRETED


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
    mask,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Both halves of one head's vector to its slot; as codes with a scale where TOP > 0."""
    block = slot // BLOCK
    offset = slot % BLOCK
    at = cache + block * block_stride + head * head_stride + offset * (2 * HALF) + half_columns
    if TOP > 0:
        peak = tl.maximum(
            tl.max(tl.where(mask, tl.abs(low), 0.0), 0),
            tl.max(tl.where(mask, tl.abs(high), 0.0), 0),
        )
        scale = tl.maximum(peak / TOP, 1.1754943508222875e-38)
        tl.store(cache_scale + block * scale_block_stride + head * BLOCK + offset, scale)
        tl.store(at, to_codes(low / scale, cache.dtype.element_ty, TOP, INTERPRET), mask=mask)
        tl.store(
            at + HALF, to_codes(high / scale, cache.dtype.element_ty, TOP, INTERPRET), mask=mask
        )
    else:
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
    BLOCK: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    TOP: tl.constexpr,
    EARLY: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, HALF_PADDED)
    mask = columns < HALF
    at = qkv + (token * (heads + 2 * kv_heads) + head) * (2 * HALF) + columns
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    is_query = head < heads
    is_value = head >= heads + kv_heads
    if not is_value:
        norm = k_norm
        if is_query:
            norm = q_norm
        if (Q_NORM and is_query) or (K_NORM and not is_query):
            mean = (tl.sum(low * low, 0) + tl.sum(high * high, 0)) / (2 * HALF)
            factor = 1.0 / tl.sqrt(mean + eps)
            gain_low = tl.load(norm + columns, mask=mask, other=0.0).to(tl.float32)
            gain_high = tl.load(norm + HALF + columns, mask=mask, other=0.0).to(tl.float32)
            # Rounded as the reference does, so that both rotate the same values.
            low = (low * factor * (gain_low + norm_offset)).to(qkv.dtype.element_ty)
            high = (high * factor * (gain_high + norm_offset)).to(qkv.dtype.element_ty)
            low = low.to(tl.float32)
            high = high.to(tl.float32)
        position = tl.load(positions + token)
        angle = position * HALF + columns
        c = tl.load(cos + angle, mask=mask, other=0.0)
        s = tl.load(sin + angle, mask=mask, other=0.0)
        turned = low * c - high * s
        high = high * c + low * s
        low = turned
    if is_query:
        to = q_out + (token * heads + head) * (2 * HALF) + columns
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
                head - heads - kv_heads,
                block_stride,
                head_stride,
                scale_block_stride,
                columns,
                mask,
                HALF,
                BLOCK,
                TOP,
                INTERPRET,
            )
        else:
            _store_kv(
                k_cache,
                k_scale,
                low,
                high,
                slot,
                head - heads,
                block_stride,
                head_stride,
                scale_block_stride,
                columns,
                mask,
                HALF,
                BLOCK,
                TOP,
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
    *,
    early: bool = False,
) -> torch.Tensor:
    """See `Operators.write`: qkv [N, (H + 2G) · E] → q [N, H · E]."""
    heads, kv_heads, width, tokens = spec.heads, spec.kv_heads, spec.size, len(qkv)
    out = torch.empty(tokens, spec.queries, dtype=qkv.dtype, device=qkv.device)
    coded = kv.k_scale is not None
    top = (127.0 if kv.k.dtype == torch.int8 else 448.0) if coded else 0.0
    k_scale, v_scale = (qkv, qkv) if kv.k_scale is None else (kv.k_scale, kv.v_scale)
    q_norm, k_norm = norms or (qkv, qkv)
    assert kv.k.stride() == kv.v.stride()
    assert qkv.is_contiguous()
    _rope_kernel[(tokens, heads + 2 * kv_heads)](
        qkv,
        out,
        kv.k,
        kv.v,
        k_scale,
        v_scale,
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
        BLOCK=kv.block_size,
        Q_NORM=norms is not None,
        K_NORM=norms is not None,
        TOP=top,
        INTERPRET=INTERPRETED,
        num_warps=1,
        **launch_options(early),
    )
    return out

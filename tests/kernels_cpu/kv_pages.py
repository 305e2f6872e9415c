"""KV as the operators declare it, and as the CPU kernels keep it (csrc/pages.h)."""

from __future__ import annotations

import torch

from headrace.kernels.operators import KvLayer

TOGETHER = {torch.bfloat16: 2, torch.int8: 4}
"""Numbers that lie next to each other, by type."""


def as_pages(kv: KvLayer) -> KvLayer:
    """K pages [E][S], of pairs [E/2][S][2], of codes [E/4][S][4] with 128 added; V pages [S][E],
    [S/2][E][2], [S/4][E][4]."""
    wide = TOGETHER.get(kv.k.dtype, 1)
    k = _apart(kv.k, -1, wide).transpose(-2, -3).contiguous().view(kv.k.shape)
    v = _apart(kv.v, -2, wide).transpose(-1, -2).contiguous().view(kv.v.shape)
    return KvLayer(_offset(k), v, kv.k_scale, kv.v_scale)


def from_pages(kv: KvLayer) -> KvLayer:
    wide = TOGETHER.get(kv.k.dtype, 1)
    blocks, heads, size, width = kv.k.shape
    k = _offset(kv.k).view(blocks, heads, width // wide, size, wide).transpose(-2, -3)
    v = kv.v.view(blocks, heads, size // wide, kv.v.shape[-1], wide).transpose(-1, -2)
    return KvLayer(
        k.contiguous().view(kv.k.shape), v.contiguous().view(kv.v.shape), kv.k_scale, kv.v_scale
    )


def _apart(x: torch.Tensor, axis: int, wide: int) -> torch.Tensor:
    """[…, n, …] → […, n / wide, wide, …]."""
    return x.unflatten(axis, (x.shape[axis] // wide, wide))


def _offset(k: torch.Tensor) -> torch.Tensor:
    return k if k.dtype != torch.int8 else k ^ -128

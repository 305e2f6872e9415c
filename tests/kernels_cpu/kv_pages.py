"""KV as the operators declare it, and as the CPU kernels keep it (csrc/pages.h)."""

from __future__ import annotations

import torch

from headrace.kernels.operators import KvLayer

IN_PAIRS = (torch.bfloat16, torch.int8)


def as_pages(kv: KvLayer) -> KvLayer:
    """K pages [E][S], of pairs [E/2][S][2]; V pages [S][E], of pairs [S/2][E][2], in four bits as
    declared."""
    shape = blocks, heads, size, width = kv.k.shape
    if kv.k.dtype in IN_PAIRS:
        k = kv.k.view(blocks, heads, size, width // 2, 2).transpose(2, 3)
        v = kv.v if kv.v.dtype == torch.uint8 else _pairs(kv.v)
    else:
        k, v = kv.k.transpose(2, 3), kv.v
    v = v.contiguous().view(kv.v.shape)
    return KvLayer(k.contiguous().view(shape), v, kv.k_scale, kv.v_scale)


def _pairs(v: torch.Tensor) -> torch.Tensor:
    blocks, heads, size, width = v.shape
    return v.view(blocks, heads, size // 2, 2, width).transpose(3, 4)


def from_pages(kv: KvLayer) -> KvLayer:
    shape = blocks, heads, size, width = kv.k.shape
    if kv.k.dtype in IN_PAIRS:
        k = kv.k.view(blocks, heads, width // 2, size, 2).transpose(2, 3)
        v = kv.v
        if v.dtype != torch.uint8:
            v = v.view(blocks, heads, size // 2, width, 2).transpose(3, 4)
    else:
        k, v = kv.k.view(blocks, heads, width, size).transpose(2, 3), kv.v
    v = v.contiguous().view(kv.v.shape)
    return KvLayer(k.contiguous().view(shape), v, kv.k_scale, kv.v_scale)

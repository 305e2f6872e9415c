"""The paged KV of all layers on the device, and the copies between its blocks."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.arch import ModelArch
from ..base.errors import EngineFault
from ..base.step import NULL_BLOCK, BlockCopy, PoolShape
from ..kernels.arrays import HOST_DTYPES, Array, tensor
from ..kernels.operators import KvCache, KvLayer
from .options import KV_DTYPES


def allocate_kv(
    pool: PoolShape, arch: ModelArch, kv_dtype: str, device: str, *, host: bool = False
) -> KvCache:
    """Zeroed K and V [blocks, G, S, E] of each layer, in the group that holds it; with `host` in
    arrays of the host, else in tensors.

    Zeros because table entries out of a window point to the null block, and a query multiplies
    what lies there by nought: it must be finite.
    """
    count = arch.layers if arch.encoder is None else 0  # An encoder keeps nothing.
    layers: list[KvLayer | None] = [None] * count
    groups = [-1] * count
    zeros = _zeros_of(device, host=host)
    for number, group in enumerate(pool.groups):
        shape = (group.blocks, arch.kv_heads, pool.block_size, arch.head_dim)
        for layer in group.layers:
            assert groups[layer] == -1, f"layer {layer} is in two groups"
            assert group.window == arch.window(layer), f"layer {layer} is in the wrong group"
            groups[layer] = number
            k, v = (zeros(shape, kv_dtype) for _ in range(2))
            scales: list[Array | None] = [None, None]
            if kv_dtype in ("int8", "fp8"):
                scales = [zeros(shape[:3], "float32") for _ in range(2)]
            layers[layer] = KvLayer(k, v, scales[0], scales[1])
    assert -1 not in groups, f"layer {groups.index(-1)} is in no group"
    windows = [group.window for group in pool.groups]
    return KvCache([layer for layer in layers if layer is not None], groups, windows)


def pool_bytes(pool: PoolShape, arch: ModelArch, kv_dtype: str) -> int:
    """What `allocate_kv` takes."""
    width = KV_DTYPES[kv_dtype]
    token = 2 * arch.kv_heads * (arch.head_dim * width + (4 if kv_dtype in ("int8", "fp8") else 0))
    return sum(group.blocks * len(group.layers) for group in pool.groups) * pool.block_size * token


def _zeros_of(device: str, *, host: bool) -> Callable[[tuple[int, ...], str], Array]:
    """Who makes zeros of a shape and a type of `KV_DTYPES`."""
    if host:
        return _host_zeros_of
    import torch  # Local: arrays of the host do without.

    def zeros(shape: tuple[int, ...], name: str) -> torch.Tensor:
        dtype = torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)
        if device != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        size = torch.empty(0, dtype=dtype).itemsize
        raw = _host_zeros((math.prod(shape) * size,), np.dtype(np.uint8))
        return tensor(raw).view(dtype).view(shape)

    return zeros


def _host_zeros_of(shape: tuple[int, ...], name: str) -> Array:
    return _host_zeros(shape, HOST_DTYPES[name])


def _host_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Zeros as pages that the system hands out when they are first written.

    A pool of gigabytes then costs no time at start, and memory only as sequences need it.
    """
    # Shared pages, as is mmap's default, are huge only where the system's `shmem_enabled` lets the
    # advice below count. Private ones become huge on most systems, which is no faster (8 and 32
    # rows) and 95 MiB more at the start, for each of 48 regions begins with one.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # A kernel built without them.
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype).reshape(shape)


def _arrays(layer: KvLayer) -> list[Array]:
    return [t for t in (layer.k, layer.v, layer.k_scale, layer.v_scale) if t is not None]


def copy_blocks(cache: KvCache, copies: Sequence[BlockCopy]) -> None:
    """Copy whole blocks inside the device's pool, in the order given."""
    for copy in copies:
        if copy.source_tier or copy.target_tier:
            raise EngineFault("this worker has no KV tier but the device's own memory")
        for layer, group in zip(cache.layers, cache.groups, strict=True):
            if group == copy.group:
                for array in _arrays(layer):
                    array[copy.target] = array[copy.source]


def clear_null_blocks(cache: KvCache) -> None:
    """Undo what padding and warm-up wrote to the null block."""
    for layer in cache.layers:
        for array in _arrays(layer):
            array[NULL_BLOCK] = 0

"""The paged KV of all layers on the device, and the copies between its blocks."""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.graph import AttentionSpec
from ..base.groups import pool_bytes
from ..base.step import NULL_BLOCK, BlockCopy, PoolShape
from ..kernels.arrays import HOST_DTYPES, Array, dtype_name, floats, tensor
from ..kernels.key_bias import key_bias
from ..kernels.model import Model
from ..kernels.operators import KvCache, KvLayer, StateLayer

HUGE = 2 << 20
"""Bytes of a huge page."""
READ_WHOLE = 1 << 20
"""Bytes of a block from which its array uses huge pages. Each step reads a whole state of a
megabyte, 1.15 to 1.4 times as fast as from small pages."""


class PoolMemory:
    """Memory for the arrays of one pool after another: private, or a file that another process has
    open too.

    In a file each pool begins after the one before it, whose memory goes back to the system: a late
    reader of the old pool writes into no other. Processes that make the same pools in the same
    order have the same arrays.
    """

    def __init__(self, file: int = -1, begins: int = 0, *, reads: bool = False) -> None:
        """Use private memory, or a file. `file`: a descriptor of `os.memfd_create`; -1: private
        memory. `begins`: offset of the first pool; `reads`: the pool exists and is only read."""
        self.file, self.at, self._end = file, begins, begins
        """Offset of the last pool in the file (`at`)."""
        self._reads = reads
        self._pages = mmap.mmap(-1, 1)
        self._next = 0

    @classmethod
    def lent(cls) -> PoolMemory:
        """Make memory in a file of its own, sealed against shrinking: others may map it."""
        if not hasattr(os, "memfd_create"):
            return cls()
        memory = cls(os.memfd_create("headrace pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        fcntl.fcntl(memory.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        weakref.finalize(memory, os.close, memory.file)
        return memory

    def begin(self, pool: PoolShape) -> None:
        """Start the arrays of `pool`; the next calls of `zeros` return them.

        Pages get memory when they are first written. So a pool of gigabytes costs no time at start,
        and memory only as sequences need it.
        """
        held = (*pool.groups, *pool.cross)
        count = sum(len(group.layers) * len(group.arrays) for group in held)
        size = pool_bytes(pool) + max(1, count) * mmap.PAGESIZE
        size -= size % mmap.PAGESIZE
        # Shared pages (mmap's default) become huge only if the system's `shmem_enabled` follows the
        # advice below. Private ones become huge on most systems, which is no faster for KV (8 and
        # 32 rows) and took 95 MiB more at the start.
        if self.file < 0:
            pages = mmap.mmap(-1, size)
        elif self._reads:
            pages = mmap.mmap(self.file, size, prot=mmap.PROT_READ, offset=self.at)
        else:
            if self._end:
                self._pages.madvise(mmap.MADV_REMOVE)
            if os.fstat(self.file).st_size < self._end + size:
                os.ftruncate(self.file, self._end + size)
            pages = mmap.mmap(self.file, size, offset=self._end)
            self.at, self._end = self._end, self._end + size
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # A kernel built without them.
                pages.madvise(mmap.MADV_HUGEPAGE)
        self._pages, self._next = pages, 0

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Return the next array, aligned to a page."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self.file < 0 and nbytes >= READ_WHOLE * shape[0] and hasattr(mmap, "MADV_HUGEPAGE"):
            return _huge(nbytes).view(dtype).reshape(shape)
        array = np.frombuffer(self._pages, dtype, math.prod(shape), self._next).reshape(shape)
        self._next += -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return array


def _huge(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return zeroed bytes in huge pages of their own, as far as the system provides them."""
    pages = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel built without them.
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    first = -whole.ctypes.data % HUGE
    return whole[first : first + nbytes]


def allocate_kv(
    pool: PoolShape, device: str, *, host: bool = False, memory: PoolMemory | None = None
) -> KvCache:
    """Make zeroed arrays of each layer, as its group states them, in pages [blocks, G, S, …].

    `host`: numpy arrays in host memory, else tensors. `memory`: of arrays in host memory.

    Zeroed because table entries outside a window point to the null block. Its positions get weight
    0, and 0 · NaN is NaN, so its content must be finite.
    """
    held = (*pool.groups, *pool.cross)
    kept = [layer for group in held for layer in group.layers]
    assert len({*kept}) == len(kept), "a layer is in two groups"
    layers: dict[int, KvLayer] = {}
    states: dict[int, StateLayer] = {}
    groups = [0] * (1 + max(kept, default=-1))
    zeros = _zeros_of(pool, device, memory or PoolMemory(), host=host)
    for number, group in enumerate(held):
        for layer in group.layers if group.state else ():
            shapes = {name: ((group.blocks, *shape), dtype) for name, shape, dtype in group.arrays}
            made = {name: zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
            states[layer], groups[layer] = StateLayer(**made), number
        if group.state:
            continue
        pages = {
            name: ((group.blocks, shape[0], pool.block_size, *shape[1:]), dtype)
            for name, shape, dtype in group.arrays
        }
        # The form of a GPU's kernels: see `KvLayer.across`.
        across = device == "cuda" and not host and pages.get("v", ((), ""))[1] == "fp8"
        if across:
            (blocks, heads, size, width), dtype = pages["v"]
            pages["v"] = ((blocks, heads, width, size), dtype)
        for layer in group.layers:
            arrays = {name: zeros(shape, dtype) for name, (shape, dtype) in pages.items()}
            if across:
                arrays["v"] = arrays["v"].transpose(2, 3)
            k, v = ("latent", "latent") if "latent" in arrays else ("k", "v")
            layers[layer] = KvLayer(
                arrays[k], arrays[v], arrays.get(f"{k}_scale"), arrays.get(f"{v}_scale")
            )
            groups[layer] = number
    windows = [group.window for group in held]
    some = states or len(groups) > len(kept)
    by_number = layers if some else [layers[layer] for layer in range(len(kept))]
    return KvCache(by_number, groups, windows, states)


def leave_biases_out(model: Model, backend: str, cache: KvCache) -> None:
    """Record in `cache` which biases its int8 keys are kept without, if the backend of that name
    adds them again.

    Only for a bias that reaches the key unchanged: norms on the heads come in between.
    """
    if backend not in ("ref", "cpu", "triton"):
        return
    graph, weights = model.graph, model.weights
    for node in graph.nodes:
        if node.kind != "write" or node.weights or not isinstance(node.spec, AttentionSpec):
            continue
        kv, spec = cache.layers[node.spec.layer], node.spec
        source = graph.maker(node.reads[0])
        given = graph.nodes[source] if source >= 0 else None
        if dtype_name(kv.k) != "int8" or given is None or given.kind != "linear":
            continue
        if len(given.weights) < 2 or (spec.rope is not None and spec.rope.axes):
            continue  # By axes a bias is turned by more than its key's position.
        keys = slice(spec.queries, spec.queries + spec.kv_heads * spec.size)
        bias = floats(weights.vector(given.weights[1]))[keys].reshape(spec.kv_heads, spec.size)
        rope = weights.rope(spec)
        halves = rope is not None and 2 * rope.cos.shape[1] == spec.size
        if backend == "triton" and not (halves and spec.rope and not spec.rope.interleaved):
            continue  # Its kernels add planes of halves.
        kv.bias = key_bias(bias, rope, spec)
        if backend == "triton" and kv.bias is not None:
            kv.planes = tensor(kv.bias.planes()).to(tensor(kv.k).device)


def _zeros_of(
    pool: PoolShape, device: str, memory: PoolMemory, *, host: bool
) -> Callable[[tuple[int, ...], str], Array]:
    """Return a function that makes zeros of a shape and a type."""
    if host or device == "cpu":
        memory.begin(pool)
    if host:
        return lambda shape, name: memory.zeros(shape, HOST_DTYPES.get(name, _BYTES))
    import torch  # Local: arrays of the host do without.

    def zeros(shape: tuple[int, ...], name: str) -> torch.Tensor:
        dtype = torch.float8_e4m3fn if name == "fp8" else getattr(torch, name)
        if device != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        size = torch.empty(0, dtype=dtype).itemsize
        raw = memory.zeros((math.prod(shape) * size,), _BYTES)
        return tensor(raw).view(dtype).view(shape)

    return zeros


_BYTES = np.dtype(np.uint8)


def arrays_of(layer: KvLayer | StateLayer) -> list[Array]:
    """List each array once: a latent layer has one array for both keys and values."""
    if isinstance(layer, StateLayer):
        return [t for t in (layer.inputs, layer.state, layer.tail) if t is not None]
    found = {id(t): t for t in (layer.k, layer.v, layer.k_scale, layer.v_scale)}
    return [t for t in found.values() if t is not None]


def copy_blocks(cache: KvCache, copies: Sequence[BlockCopy]) -> None:
    """Copy whole blocks inside the device's pool, in the order given."""
    for copy in copies:
        for layer, group in cache.kept():
            if group == copy.group:
                for array in arrays_of(layer):
                    array[copy.target] = array[copy.source]


def clear_null_blocks(cache: KvCache) -> None:
    """Zero the null block, to which padding and warm-up wrote."""
    for layer, _ in cache.kept():
        for array in arrays_of(layer):
            array[NULL_BLOCK] = 0

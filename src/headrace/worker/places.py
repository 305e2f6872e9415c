"""Addresses of a group's blocks in the arrays of its layers."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..base.textlibrary import library
from ..kernels.arrays import Array, address
from ..kernels.operators import KvCache
from .kv_tensors import arrays_of
from .stack import Bytes


class Places:
    """Arrays [blocks, …] in host memory, in the order in which a block's bytes are kept.

    The caller must keep the arrays alive.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._views = [_bytes_of(array) for array in arrays]
        self._sizes = np.array([view.shape[1] for view in self._views], np.int64)
        self.nbytes = int(self._sizes.sum())
        """Bytes of one block."""
        self.blocks = min((len(view) for view in self._views), default=0)
        self._starts = np.array([address(view) for view in self._views], np.int64)
        self._offsets = np.cumsum(self._sizes) - self._sizes

    def parts(self, block: int) -> list[memoryview]:
        """Return views of the block's bytes in the pool."""
        return [view[block].data for view in self._views]

    def fill(self, blocks: Sequence[int], data: Bytes) -> None:
        """Copy `data`, of `nbytes` each and in `gather`'s order, into the blocks."""
        source = np.frombuffer(data, np.uint8)
        assert source.nbytes == len(blocks) * self.nbytes
        self._copy(self._row(address(source), len(blocks)), self._at(blocks))

    def gather(self, blocks: Sequence[int], target: memoryview) -> None:
        """Copy the blocks' bytes into `target`: array after array, of each block after block."""
        data = np.frombuffer(target, np.uint8)
        assert data.nbytes == len(blocks) * self.nbytes
        self._copy(self._at(blocks), self._row(address(data), len(blocks)))

    def copy(self, blocks: Sequence[int], other: Places, theirs: Sequence[int]) -> None:
        """Copy the blocks `theirs` of a pool of the same arrays into `blocks`."""
        assert (self._sizes == other._sizes).all()
        self._copy(other._at(theirs), self._at(blocks), streams=True)

    def send(self, file: int, blocks: Sequence[int], seconds: float) -> None:
        """Send the blocks' bytes in `gather`'s order, from the pool, through a non-blocking socket.
        Needs the native library. Raises `OSError`."""
        self._pass("hrt_send", file, blocks, seconds)

    def receive(self, file: int, blocks: Sequence[int], seconds: float) -> None:
        """Receive blocks into the pool, like `send`. After an `OSError` they hold anything."""
        self._pass("hrt_receive", file, blocks, seconds)

    def populate(self, blocks: Sequence[int], *, writes: bool) -> None:
        """Let the system allocate the pages of the blocks for writing or reading: the first touch
        of a page is as slow as ten copies of it. Their content stays."""
        if (loaded := library()) is not None:
            places, sizes = self._list(blocks)
            loaded.hrt_populate(address(places), address(sizes), sizes.size, writes)

    def clear(self, blocks: Sequence[int]) -> None:
        for view in self._views:
            view[blocks] = 0

    def _pass(self, name: str, file: int, blocks: Sequence[int], seconds: float) -> None:
        places, sizes = self._list(blocks)
        do = getattr(library(), name)
        if wrong := do(file, address(places), address(sizes), sizes.size, seconds):
            raise OSError(wrong, os.strerror(wrong))

    def _list(self, blocks: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return addresses and sizes of all pieces."""
        places = self._at(blocks)
        return places, np.repeat(self._sizes, len(blocks))

    def _at(self, blocks: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return addresses [parts, blocks]."""
        numbers = np.array(blocks, np.int64)
        assert not numbers.size or 0 <= numbers.min() <= numbers.max() < self.blocks
        return self._starts[:, None] + numbers * self._sizes[:, None]

    def _row(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Return addresses [parts, blocks] in a buffer to which `gather` wrote `count` blocks."""
        return start + self._offsets[:, None] * count + np.arange(count) * self._sizes[:, None]

    def _copy(
        self,
        sources: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        *,
        streams: bool = False,
    ) -> None:
        sizes = np.repeat(self._sizes, targets.shape[1])
        loaded = library()
        if loaded is None:
            for source, target, size in zip(sources.flat, targets.flat, sizes, strict=True):
                ctypes.memmove(int(target), int(source), int(size))
            return
        loaded.hrt_copy(address(sources), address(targets), address(sizes), targets.size, streams)


def places_of(cache: KvCache) -> list[Places]:
    """Return the places of the blocks of each group of a pool."""
    arrays: list[list[Array]] = [[] for _ in range(max(cache.groups, default=0) + 1)]
    for layer, group in cache.kept():
        arrays[group] += arrays_of(layer)
    return [Places(some) for some in arrays]


def _bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    """Return a uint8 [blocks, bytes] view of the same memory."""
    if isinstance(array, np.ndarray):
        return array.reshape(len(array), -1).view(np.uint8)
    memory = (ctypes.c_uint8 * array.nbytes).from_address(address(array))
    return np.frombuffer(memory, np.uint8).reshape(len(array), -1)

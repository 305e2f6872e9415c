"""Where the bytes of a group's blocks lie in the arrays of its layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..base.textlibrary import library
from ..kernels.arrays import Array, address
from ..kernels.operators import KvCache
from .kv_tensors import arrays_of
from .stack import Bytes


class Places:
    """Arrays [blocks, …] in the host's memory, in the order in which a block's bytes are kept.

    Who makes one has to keep the arrays alive.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._views = [_bytes_of(array) for array in arrays]
        self._sizes = np.array([view.shape[1] for view in self._views], np.int64)
        self.nbytes = int(self._sizes.sum())
        """Bytes of one block."""
        self._starts = np.array([address(view) for view in self._views], np.int64)
        self._library = library()

    def parts(self, block: int) -> list[memoryview]:
        """The block's bytes where they lie."""
        return [view[block].data for view in self._views]

    def fill(self, block: int, data: Bytes) -> None:
        """Put `data`, of `nbytes`, where the block lies."""
        source = np.frombuffer(data, np.uint8)
        assert source.nbytes == self.nbytes
        if self._library is None:
            at = 0
            for view in self._views:
                view[block] = source[at : (at := at + view.shape[1])]
            return
        targets = self._starts + block * self._sizes
        self._library.hrt_spread(
            source.ctypes.data, targets.ctypes.data, self._sizes.ctypes.data, len(targets)
        )


def places_of(cache: KvCache) -> list[Places]:
    """Where the blocks of each group of a pool lie."""
    arrays: list[list[Array]] = [[] for _ in range(max(cache.groups, default=0) + 1)]
    for layer, group in cache.kept():
        arrays[group] += arrays_of(layer)
    return [Places(some) for some in arrays]


def _bytes_of(array: Array) -> npt.NDArray[np.uint8]:
    """uint8 [blocks, bytes] over the same memory."""
    if isinstance(array, np.ndarray):
        return array.reshape(len(array), -1).view(np.uint8)
    memory = (ctypes.c_uint8 * array.nbytes).from_address(address(array))
    return np.frombuffer(memory, np.uint8).reshape(len(array), -1)

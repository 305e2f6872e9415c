"""Matrices of a checkpoint that are quantised to GGUF's Q8_0 when their numbers are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels.weights import BlockWeight, LateWeight

Array = npt.NDArray[Any]
_AT_ONCE = 1 << 16
"""Numbers that are quantised at a time."""


@dataclass(frozen=True, slots=True)
class LateBlocks:
    """One matrix [out, in], read and quantised when it is taken."""

    name: str
    shape: tuple[int, int]
    numbers: Callable[[], Array]
    """Reader of the matrix. Raises `ModelFileError`."""
    host_dtype = "Q8_0"
    """The kind as `Question.weights` names it."""

    def read(self) -> BlockWeight:
        return q8_0(self.numbers(), self.name)

    def late(self, name: str) -> LateWeight:
        return LateWeight(name, self.shape, None, self.read)


@dataclass(frozen=True, slots=True)
class LateNumbers:
    """One dense matrix [out, in], read when it is taken."""

    shape: tuple[int, int]
    host_dtype: str
    read: Callable[[], Array]
    """Reader of the matrix. Raises `ModelFileError`."""


def q8_0(matrix: Array, name: str = "") -> BlockWeight:
    """Quantise [out, in] to GGUF's Q8_0: for each 32 an fp16 scale, max |x| / 127, and their codes.

    A few rows at a time, which stay in the cache: that takes numpy a third of the time.
    """
    out, width = matrix.shape
    data = np.empty((out, width // 32, 34), np.uint8)
    step = max(1, _AT_ONCE // width)
    for first in range(0, out, step):
        blocks = matrix[first : first + step].astype(np.float32).reshape(-1, width // 32, 32)
        size = np.abs(blocks)
        largest = size
        while largest.shape[2] > 1:  # numpy is slow along an axis of few numbers.
            half = largest.shape[2] // 2
            largest = np.maximum(largest[..., :half], largest[..., half:])
        scale = (largest / 127).astype(np.float16)
        by = scale.astype(np.float32)
        by[by == 0] = np.inf
        np.rint(np.divide(blocks, by, out=size), out=size)
        into = data[first : first + step]
        into[..., :2] = scale.view(np.uint8)
        into[..., 2:] = np.clip(size, -127, 127, out=size).astype(np.int8).view(np.uint8)
    return BlockWeight("Q8_0", data.reshape(out, -1), (out, width), name)

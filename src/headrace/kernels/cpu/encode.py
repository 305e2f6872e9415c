"""Dense weights as blocks of GGUF, and scales for compressed-tensors (csrc/encode.cpp)."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from ...base.errors import ModelFileError, UnsupportedModel
from ...base.hardware import cpu
from ..arrays import Array, address, dtype_name
from ..bit_fields import Bytes
from .library import LibraryAbsent, Team, load
from .panels import DENSE_KINDS, in_order
from .records import KINDS

BLOCKS = {
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q5_0": (32, 22),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
"""Target kinds, with the numbers and bytes of a block."""
LARGEST = 60_000
"""Largest magnitude of a weight that may be quantised."""


class Encoder:
    """Encoder of weights on a thread pool: the same numbers give the same bytes.

    Raises `ModelFileError` for numbers that are not finite, or too large for a scale in half
    precision.
    """

    def __init__(self, team: Team) -> None:
        self._team = team

    def __call__(self, kind: str, rows: Array) -> Bytes:
        """Encode as blocks of a kind of `BLOCKS`: dense [rows, values] → uint8 [rows, bytes].

        A row is a whole number of blocks.
        """
        rows = in_order(rows)
        values, nbytes = BLOCKS[kind]
        count, width = rows.shape
        out = np.empty((count, width // values * nbytes), np.uint8)
        kinds = KINDS[kind], KINDS[DENSE_KINDS[dtype_name(rows)]]
        given = address(rows), count * width, address(out)
        bounded(not load().hr_encode(self._team.handle, *kinds, *given))
        return out

    def symmetric(self, groups: npt.NDArray[np.float32], half: int) -> npt.NDArray[np.float32]:
        """Return the scale [n] of each group [n, g] for codes of -half … half - 1; g is 16, 32, 64
        or 128.

        A scale may be negative: the weight of the largest magnitude gets the code -half.
        """
        groups = np.ascontiguousarray(groups)
        scales = np.empty(len(groups), np.float32)
        given = address(groups), groups.size, groups.shape[1], half, address(scales)
        bounded(not load().hr_symmetric(self._team.handle, *given))
        return scales


@functools.cache
def encoder() -> Encoder:
    """Return this process's encoder, with a thread pool of all cores. Raises `UnsupportedModel`."""
    try:
        return Encoder(Team(cpu().cores))
    except LibraryAbsent as absent:
        raise UnsupportedModel(f"weights are quantised by the CPU kernels: {absent}") from None


def bounded(known: bool) -> None:
    """Raise `ModelFileError` unless weights are known to be of magnitudes up to `LARGEST`."""
    if not known:
        raise ModelFileError("a weight is not finite, or too large for a scale in half precision")

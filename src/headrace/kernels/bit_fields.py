"""Bit fields in bytes, as in GGUF's blocks.

Low bits first: field f of byte j of run r is number (r · fields of a byte + f) · run + j.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def split(packed: Bytes, width: int, run: int) -> Bytes:
    """Unpack bytes [n, B], in runs of `run`, to [n, B · 8 / width] numbers of `width` bits."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> shifts) & np.uint8((1 << width) - 1)).reshape(len(packed), -1)


def join(codes: Bytes, width: int, run: int) -> Bytes:
    """Pack codes [n, K] into the bytes [n, K · width / 8] that `split` reads."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    parts = codes.reshape(len(codes), -1, 8 // width, run) << shifts
    joined: Bytes = np.bitwise_or.reduce(parts, axis=2).reshape(len(codes), -1)
    return joined

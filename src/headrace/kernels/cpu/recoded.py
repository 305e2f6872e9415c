"""Blocks without panels of their own, recoded as kinds with panels that hold the same numbers.

Q3_K is w = d · s · (code - 4) with eight codes and scales s of six bits, for each 16 weights: Q6_K
with codes higher by 28. Q2_K has an offset for each 16 weights, unlike all other formats, so it
becomes plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import Array
from ..bit_fields import Bytes, join, split
from ..weights import BlockWeight
from .narrow import NarrowWeight


def _six_bits(b: Bytes) -> Bytes:
    """Convert blocks of Q3_K [n, 110] to Q6_K [n, 210]."""
    low, high = split(b[:, 96:104], 4, 8), split(b[:, 104:108], 2, 4)
    scales = (low | (high << 4)).view(np.int8) - np.int8(32)
    # The third bit is worth 4; if it is clear, 4 is subtracted.
    third: Bytes = split(b[:, :32], 1, 32) << np.uint8(2)
    codes: Bytes = (split(b[:, 32:96], 2, 32) | third) + np.uint8(28)
    low, high = join(codes & np.uint8(15), 4, 64), join(codes >> np.uint8(4), 2, 32)
    return np.concatenate([low, high, scales.view(np.uint8), b[:, 108:]], axis=1)


def _numbers(b: Bytes) -> Bytes:
    """Convert blocks of Q2_K [n, 84] to the bytes of their 256 numbers in fp32 [n, 1024]."""
    d, least = (np.ascontiguousarray(b[:, at : at + 2]).view(np.float16) for at in (80, 82))
    scales = d.astype(np.float32) * (b[:, :16] & 15)
    offsets = least.astype(np.float32) * (b[:, :16] >> 4)
    codes = split(b[:, 16:80], 2, 32).reshape(-1, 16, 16)
    made: Bytes = (
        (codes * scales[..., None] - offsets[..., None]).reshape(len(b), -1).view(np.uint8)
    )
    return made


_RECODED: dict[str, tuple[str, int, Callable[[Bytes], Bytes]]] = {
    "Q2_K": ("F32", 84, _numbers),
    "Q3_K": ("Q6_K", 110, _six_bits),
}
"""Kind → (kind whose panels hold it, bytes of a block, conversion of its blocks)."""
RECODED = frozenset(_RECODED)


def recoded(weight: BlockWeight) -> NarrowWeight:
    """Wrap a weight of a kind in `RECODED` as one that has panels; it is recoded only if none are
    kept."""
    kind, size, change = _RECODED[weight.kind]

    def encode(_: str, rows: Array) -> Bytes:
        return change(np.asarray(rows).reshape(-1, size)).reshape(len(rows), -1)

    return NarrowWeight(kind, weight, encode)

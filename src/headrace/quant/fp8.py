"""Loader of the fp8 matrices of safetensors checkpoints into `Fp8Weight`s, as they are stored.

w = data · scale, with e4m3 `data`. There is one scale for the tensor, one per output row, or one
per block of 128 x 128 (DeepSeek-V3, 2024). The scale's own shape distinguishes them; it must be the
one that the config promised. The block's scale is called `weight_scale_inv` there; it multiplies
all the same. Stored scales of activations (`input_scale`) are not read: kernels measure each row.
Torch-free: bytes stand for the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..kernels.arrays import floats
from ..kernels.weights import FP8_BLOCK, Fp8Weight

MOST = 2.0**100
"""Bound of a scale: multiplied by a byte of 448 and 256 times the kernels' own, it stays finite."""
SCALES = ("weight_scale", "weight_scale_inv")


def fp8_weight(tensors: Mapping[str, npt.NDArray[Any]], strategy: str, name: str) -> Fp8Weight:
    """Return the matrix that `tensors` (by suffix) hold, scales fp32 [1, 1], [out, 1] or by block.

    `strategy`: "tensor", "channel" or "block". Raises `ModelFileError`.
    """
    data = tensors["weight"]
    if data.dtype != np.uint8 or ((data & 0x7F) == 0x7F).any():
        raise ModelFileError(f"{name}: weight must be float8_e4m3fn, and every number finite")
    found = [suffix for suffix in SCALES if suffix in tensors]
    if len(found) != 1:
        raise ModelFileError(f"{name}: needs one of {' and '.join(SCALES)}, has {len(found)}")
    stored = tensors[found[0]]
    out, width = data.shape
    shapes = {
        "tensor": (1, 1),
        "channel": (out, 1),
        "block": (-(-out // FP8_BLOCK), -(-width // FP8_BLOCK)),
    }
    wanted = shapes[strategy]
    # Files also have a scalar, [1] or [out] here.
    if stored.size != wanted[0] * wanted[1] or (stored.ndim == 2 and stored.shape != wanted):
        raise ModelFileError(
            f"{name}: {found[0]} has shape {list(stored.shape)}; {list(wanted)} is needed for "
            f"{out} x {width} by {strategy}"
        )
    if stored.dtype not in (np.float32, np.float16, np.uint16):
        raise ModelFileError(f"{name}: {found[0]} must be floating point, not {stored.dtype}")
    scales = floats(stored).reshape(wanted)
    if not (np.abs(scales) < MOST).all():
        raise ModelFileError(f"{name}: {found[0]} holds numbers that are not finite, or too large")
    return Fp8Weight(data, scales)

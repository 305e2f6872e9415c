"""Loader of the NVFP4 matrices of safetensors checkpoints. Torch-free.

w = number · scale / global scale: numbers of four bits (e2m1), the even input in the low half of a
byte; scales in e4m3 for 16 inputs; one fp32 divisor for the matrix. Stored scales of activations
are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..kernels.weights import PackedWeight

TWICE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int16)
"""Twice the number of each four-bit code."""
ZERO, GROUP = 16, 16
_BYTES = np.arange(256, dtype=np.int32)
_EXPONENT, _FRACTION = _BYTES >> 3 & 15, (_BYTES & 7).astype(np.float32)
E4M3 = np.where(
    _EXPONENT > 0,
    np.ldexp(8 + _FRACTION, _EXPONENT - 10),
    np.ldexp(_FRACTION, -9),
).astype(np.float32) * np.where(_BYTES < 128, 1, -1).astype(np.float32)
"""Number of each byte of e4m3; the two codes of NaN are refused before."""


def fp4_weight(tensors: Mapping[str, npt.NDArray[Any]], name: str) -> PackedWeight:
    """Return the matrix that `tensors` (by suffix) hold, with twice its numbers as codes. Raises
    `ModelFileError`."""
    packed, scales = tensors["weight_packed"], tensors.get("weight_scale")
    divisor = tensors.get("weight_global_scale")
    out, width = packed.shape[0], 2 * packed.shape[1]
    if width % GROUP or scales is None or scales.shape != (out, width // GROUP):
        has = "missing" if scales is None else f"of shape {list(scales.shape)}"
        raise ModelFileError(f"{name}: weight_scale is {has}; {[out, width // GROUP]} is needed")
    if packed.dtype != np.uint8 or scales.dtype != np.uint8 or ((scales & 0x7F) == 0x7F).any():
        raise ModelFileError(
            f"{name}: weight_packed must be uint8, weight_scale float8_e4m3fn, and both finite"
        )
    sound = divisor is not None and divisor.size == 1 and divisor.dtype == np.float32
    if divisor is None or not sound or not 2.0**-60 < abs(float(divisor.reshape(-1)[0])) < 2.0**60:
        raise ModelFileError(f"{name}: weight_global_scale must be one finite number in fp32")
    each = E4M3[scales] / divisor.reshape(-1)[0] / np.float32(2)
    halves = np.stack([packed & 15, packed >> 4], axis=-1).reshape(out, width)
    return PackedWeight(
        codes=(TWICE[halves] + ZERO).astype(np.uint8),
        scales=np.ascontiguousarray(each),
        offsets=np.ascontiguousarray(each * np.float32(-ZERO)),
        bits=8,
        group=GROUP,
        shape=(out, width),
        unit=0.5 / float(divisor.reshape(-1)[0]),
    )

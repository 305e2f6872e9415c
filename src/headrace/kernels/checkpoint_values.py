"""Values of a checkpoint's quantised matrices, in host memory. Torch-free."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from .weights import FP8_BLOCK, Fp8Weight, PackedWeight

Floats = npt.NDArray[np.float32]


def values(weight: PackedWeight | Fp8Weight) -> Floats:
    """Return fp32 [out, in], each number rounded once, with inputs in the model's order."""
    out, width = weight.shape
    if isinstance(weight, Fp8Weight):
        scales = block_scales(weight).repeat(FP8_BLOCK, 1)[:, :width]
        found: Floats = e4m3()[weight.data] * scales
        return found
    grouped = weight.codes.reshape(out, -1, weight.group) * weight.scales[..., None].astype(float)
    if weight.offsets is not None:
        grouped += weight.offsets[..., None]
    ordered: Floats = grouped.reshape(out, width).astype(np.float32)
    if weight.order is None:
        return ordered
    found = np.empty_like(ordered)
    found[:, weight.order] = ordered
    return found


def block_scales(weight: Fp8Weight) -> Floats:
    """Return fp32 [out, ceil(in / 128)]: the scale of each row in each block, in any stored
    form."""
    out, width = weight.shape
    scales = weight.scales.repeat(FP8_BLOCK, 0)[:out] if weight.blocked else weight.scales
    return np.broadcast_to(scales, (out, -(-width // FP8_BLOCK)))


@functools.cache
def e4m3() -> Floats:
    """Return the number of each byte (OCP 8-bit floating point 1.0, E4M3): ±2^(e - 7) · (1 + m /
    8), or ±2^-6 · m / 8 if e is 0; NaN for the last code of each sign."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    size = np.where(exponent, 8 + fraction, fraction) * 2.0 ** (np.maximum(exponent, 1) - 10)
    size[byte & 127 == 127] = np.nan
    found: Floats = np.where(byte > 127, -size, size).astype(np.float32)
    return found

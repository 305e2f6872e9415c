"""Expected result of `csrc/encode.cpp`, to the bit: in numpy.

Each group's scale is the one of a few candidates whose weighted squared error is least; given the
codes, the best scale is a quotient of sums. Large weights count more, as they do in a product. All
of it is fp32. Sources: the block structures of ggml-quants, which `quant.ggml` decodes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.kernels.bit_fields import Bytes, join
from headrace.quant.ggml_types import BY_NAME

Floats = npt.NDArray[np.float32]
STEPS = range(-8, 9, 2)
"""Tenths of a code by which the largest weight is tried beside the last code."""


def encode(kind: str, rows: Floats) -> Bytes:
    """Blocks of a GGUF type (`ENCODERS`): [rows, values] → uint8 [rows, bytes]."""
    return ENCODERS[kind](rows.reshape(-1, BY_NAME[kind].block)).reshape(len(rows), -1)


def symmetric(groups: Floats, half: int) -> Floats:
    """Scale [n] of each group [n, g], whose codes are to be -half … half - 1.

    A scale may be negative: the weight of largest size takes the code -half.
    """
    top = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    weights = _weights(groups)
    best, scale = np.full(len(groups), -1.0, np.float32), np.zeros(len(groups), np.float32)
    for step in STEPS:
        inverse = np.divide(-(half + 0.1 * step), top, out=np.zeros_like(top), where=top != 0)
        codes = np.clip(np.rint(groups * inverse), -half, half - 1)
        weighted = weights * codes
        along, across = (weighted * groups).sum(axis=1), (weighted * codes).sum(axis=1)
        found = np.divide(along, across, out=np.zeros_like(along), where=across > 0)
        better = along * found > best
        best, scale = np.where(better, along * found, best), np.where(better, found, scale)
    return scale


def affine(groups: Floats, last: int) -> tuple[Floats, Floats]:
    """(scale, minimum) [n] of each group [n, g]: w = scale · code - minimum, codes 0 … last."""
    low, high = np.minimum(groups.min(axis=1), 0), groups.max(axis=1)
    span = np.maximum(high - low, 0)[:, None]
    weights = _weights(groups)
    total, linear = weights.sum(axis=1), (weights * groups).sum(axis=1)
    best = np.full(len(groups), np.inf, np.float32)
    scale, least = np.zeros_like(low), -low
    for step in STEPS:
        inverse = np.divide(last + 0.1 * step, span, out=np.zeros_like(span), where=span > 0)
        codes = np.clip(np.rint((groups - low[:, None]) * inverse), 0, last)
        weighted = weights * codes
        one, two = weighted.sum(axis=1), (weighted * codes).sum(axis=1)
        along = (weighted * groups).sum(axis=1)
        ground = total * two - one * one
        known = ground > 1e-5 * total * two  # Else all codes are alike, and no line is told.
        slope = np.divide(total * along - one * linear, ground, out=np.zeros_like(one), where=known)
        offset = np.divide(two * linear - one * along, ground, out=low.copy(), where=known)
        # A format of this kind has no minimum above zero: then the line goes through it.
        through = np.divide(along, two, out=np.zeros_like(one), where=two > 0)
        slope = np.where((offset > 0) | ~known, through, slope)
        offset = np.minimum(offset, 0)
        error = (weights * (slope[:, None] * codes + offset[:, None] - groups) ** 2).sum(axis=1)
        better = (error < best) & (slope >= 0)
        best = np.where(better, error, best)
        scale, least = np.where(better, slope, scale), np.where(better, -offset, least)
    return scale, least


def codes_of(groups: Floats, scales: Floats, half: int) -> npt.NDArray[np.int8]:
    """Codes -half … half - 1 of groups [n, g] by the scales [n] as they are stored."""
    inverse = np.divide(1.0, scales, out=np.zeros_like(scales), where=scales != 0)[:, None]
    return np.clip(np.rint(groups * inverse), -half, half - 1).astype(np.int8)


def _weights(groups: Floats) -> Floats:
    found: Floats = np.abs(groups)
    found += np.sqrt((groups * groups).mean(axis=1, keepdims=True))
    return found


def _half(numbers: Floats) -> tuple[Bytes, Floats]:
    """(the two bytes, the value) of each number [n] in half precision."""
    rounded = numbers.astype("<f2")
    return rounded.view(np.uint8).reshape(-1, 2), rounded.astype(np.float32)


def _q8_0(groups: Floats) -> Bytes:
    """The nearest code to each weight, by the scale that makes the largest one 127."""
    exact = np.abs(groups).max(axis=1) / np.float32(127)
    inverse = np.divide(np.float32(1), exact, out=np.zeros_like(exact), where=exact > 0)[:, None]
    scaled = groups * inverse
    # Halves go away from zero, as in C's round.
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([_half(exact)[0], codes.view(np.uint8)], axis=1)


def _q4_0(groups: Floats) -> Bytes:
    stored, scales = _half(symmetric(groups, 8))
    codes = (codes_of(groups, scales, 8) + 8).astype(np.uint8)
    return np.concatenate([stored, join(codes, 4, 16)], axis=1)


def _q5_0(groups: Floats) -> Bytes:
    stored, scales = _half(symmetric(groups, 16))
    codes = (codes_of(groups, scales, 16) + 16).astype(np.uint8)
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")
    return np.concatenate([stored, fifth, join((codes & 15).astype(np.uint8), 4, 16)], axis=1)


def _q4_k(blocks: Floats) -> Bytes:
    """Eight groups of 32, whose scales and minima are six bits of a block's."""
    groups = blocks.reshape(-1, 32)
    scales, minima = (one.reshape(-1, 8) for one in affine(groups, 15))
    (d, step), (dmin, least) = (_half(one.max(axis=1) / 63 + 0) for one in (scales, minima))
    sixth, under = _share(scales, step), _share(minima, least)
    slope, offset = (sixth * step[:, None]).reshape(-1, 1), (under * least[:, None]).reshape(-1, 1)
    scaled = np.divide(groups + offset, slope, out=np.zeros_like(groups), where=slope > 0)
    codes = np.clip(np.rint(scaled), 0, 15).astype(np.uint8).reshape(-1, 256)
    packed = [
        sixth[:, :4] | (sixth[:, 4:] >> 4 << 6),
        under[:, :4] | (under[:, 4:] >> 4 << 6),
        (sixth[:, 4:] & 15) | (under[:, 4:] & 15) << 4,
    ]
    return np.concatenate([d, dmin, *packed, join(codes, 4, 32)], axis=1)


def _share(numbers: Floats, unit: Floats) -> Bytes:
    """Return the number of its block's units that each one is, in six bits."""
    shares = np.divide(numbers, unit[:, None], out=np.zeros_like(numbers), where=unit[:, None] > 0)
    return np.clip(np.rint(shares), 0, 63).astype(np.uint8)


def _q6_k(blocks: Floats) -> Bytes:
    """Sixteen groups of 16, whose scales are eight bits of a block's."""
    groups = blocks.reshape(-1, 16)
    scales = symmetric(groups, 32).reshape(-1, 16)
    top = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)[:, 0]
    d, step = _half(top / np.float32(-128))
    eighth = codes_of(scales, step, 128)
    codes = codes_of(groups, (eighth * step[:, None]).reshape(-1), 32).reshape(-1, 256)
    unsigned = (codes + 32).astype(np.uint8)
    parts = [
        join((unsigned & 15).astype(np.uint8), 4, 64),
        join((unsigned >> 4).astype(np.uint8), 2, 32),
        eighth.view(np.uint8),
        d,
    ]
    return np.concatenate(parts, axis=1)


ENCODERS: dict[str, Callable[[Floats], Bytes]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q5_0": _q5_0,
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}

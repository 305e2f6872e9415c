"""The block formats of GGUF as grids, and their bytes: the inverse of `quant.ggml`.

A format fits the scales of its groups, which rounding then keeps. Scales are rounded here to what
the file stores. Sources: the block structures of ggml-quants, OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..kernels.cpu.encode import LARGEST
from ..quant.ggml_types import BY_NAME
from . import search
from .search import Floats, Nearest
from .solve import Grid

Bytes = npt.NDArray[np.uint8]
Stored = Mapping[str, npt.NDArray[Any]]
NON_LINEAR = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)
"""Values of IQ4_NL's codes."""
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Magnitudes of e2m1, by code."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A grid with the scales that the file stores."""

    grid: Grid
    stored: Callable[[Grid], Stored]
    """Function from a grid with these scales, or others that are allowed, to arrays by name
    [groups or blocks, rows]."""


class Scales(NamedTuple):
    """Fitted scales of a format."""

    scale: Floats
    """[groups, rows]."""
    offset: Floats | None
    stored: Callable[[Grid], Stored]
    allowed: Callable[[int, Floats, bool], Floats] | None = None
    """See `Grid.allowed`."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One format: its groups, the fit of their scales, and its bytes."""

    name: str
    size: int
    """Weights that share a scale."""
    fit: Callable[[Floats, Floats], Scales]
    """Function of weights [groups, rows, size] and blocks of G → scales."""
    nearest: Nearest
    pack: Callable[[Floats, Stored], Bytes]
    """Function of codes' values [rows, in] → bytes [rows, bytes]."""
    given: Callable[[Floats], Scales] | None = None
    """Function of scales [groups, rows] → the nearest that the file stores; None: it has two
    levels."""

    def of_scales(self, scale: Floats, zeros: Floats | None = None) -> Fitted:
        """Return the grid of the scales that the file stores next to these [groups, rows]."""
        assert self.given is not None
        found = self.given(scale)
        return Fitted(Grid(self.size, found.scale, None, self.nearest), found.stored)

    def fitted(self, w: Floats, gram: Floats | None) -> Fitted:
        """Fit scales to weights [rows, in] and G [in, in]; without G every input counts alike.
        Raises `ModelFileError` for weights without a scale in half precision."""
        if not np.abs(w).max(initial=0) <= LARGEST:  # Also for a NaN.
            raise ModelFileError(
                "a weight is not finite, or too large for a scale in half precision"
            )
        rows, width = w.shape
        groups = width // self.size
        grouped = np.ascontiguousarray(w.reshape(rows, groups, self.size).transpose(1, 0, 2))
        if gram is None:
            blocks = np.broadcast_to(
                np.eye(self.size, dtype=np.float32), (groups, *[self.size] * 2)
            )
        else:
            blocks = search.blocks_of(gram, self.size)
        found = self.fit(grouped, blocks)
        grid = Grid(self.size, found.scale, found.offset, self.nearest, found.allowed)
        return Fitted(grid, found.stored)


def integers(low: int, high: int) -> Nearest:
    """Return the rounding to whole numbers from `low` to `high`."""

    def nearest(scaled: Floats) -> Floats:
        found: Floats = np.rint(scaled)
        return np.clip(found, low, high, out=found)

    return nearest


def levels(values: Floats) -> Nearest:
    """Return the rounding to the nearest of ascending values; of two the larger."""
    between = (values[1:] + values[:-1]) / 2

    def nearest(scaled: Floats) -> Floats:
        return values[np.searchsorted(between, scaled, side="right")]

    return nearest


def fp4(scaled: Floats) -> Floats:
    """Round to e2m1, of two the even code."""
    size = np.abs(scaled)
    step = np.where(size < 2, np.float32(0.5), np.where(size < 4, np.float32(1), np.float32(2)))
    found: Floats = np.minimum(np.rint(size / step) * step, 6)
    return np.copysign(found, scaled)


def halves(x: Floats) -> Floats:
    """Round to numbers of half precision."""
    return x.astype(np.float16).astype(np.float32)


def _in_halves(scale: Floats) -> Scales:
    return Scales(halves(scale), None, _stored_halves, lambda group, wished, offset: halves(wished))


def _stored_halves(grid: Grid) -> Stored:
    return {"d": grid.scale.astype(np.float16)}


def _as_powers(scale: Floats) -> Scales:
    """Store the nearest powers of two."""
    exponent = np.rint(np.log2(np.maximum(np.abs(scale), np.float32(2.0**-127))))
    nearest = np.ldexp(np.float32(1), np.clip(exponent, -127, 127).astype(np.int32))
    return _in_powers(nearest.astype(np.float32))


def _in_powers(scale: Floats) -> Scales:
    return Scales(
        scale, None, lambda grid: {"e": (np.frexp(grid.scale)[1] + np.int32(126)).astype(np.uint8)}
    )


def _scaled(last: int) -> Callable[[Floats, Floats], Scales]:
    nearest = integers(-last, last - 1)
    return lambda w, blocks: _in_halves(search.symmetric(w, blocks, last, nearest))


def _largest(w: Floats, blocks: Floats) -> Scales:
    top: Floats = np.abs(w).max(-1)
    return Scales(halves(top / np.float32(127)), None, _stored_halves)


def _non_linear(w: Floats, blocks: Floats) -> Scales:
    return _in_halves(search.symmetric(w, blocks, 127, levels(NON_LINEAR), 0.8))


def _powers(w: Floats, blocks: Floats) -> Scales:
    """Choose among the powers of two next to the one whose 4 is the largest weight's place."""
    top: Floats = np.abs(w).max(-1)
    exponent = np.where(top > 0, np.frexp(np.maximum(top, 1e-38))[1] - 3, -127).astype(np.int32)
    candidates = np.stack([np.clip(exponent + step, -127, 127) for step in (0, 1, -1)])
    scales = np.ldexp(np.float32(1), candidates).astype(np.float32)
    return _in_powers(search.among(w, blocks, scales, fp4))


class _Multiples:
    """Scales that are whole multiples, from `low` to `high`, of a step in half precision that each
    row has for `count` groups."""

    def __init__(self, top: Floats, count: int, low: int, high: int) -> None:
        """Take the values [groups / count, rows] that the last multiple stands for."""
        self.step = halves(top)
        self.count, self.low, self.high = count, low, high
        self._inverse = np.divide(1, self.step, out=np.zeros_like(self.step), where=self.step != 0)

    def each(self) -> Floats:
        """Return steps of groups [groups, rows]."""
        return np.repeat(self.step, self.count, 0)

    def multiples(self, scales: Floats) -> Floats:
        """Return the nearest multiples [groups, rows] of scales."""
        found: Floats = np.rint(scales * np.repeat(self._inverse, self.count, 0))
        return np.clip(found, self.low, self.high, out=found)

    def allowed(self, group: int, wished: Floats) -> Floats:
        """Return the nearest scales [rows] of a group."""
        step, inverse = (one[group // self.count] for one in (self.step, self._inverse))
        found: Floats = np.clip(np.rint(wished * inverse), self.low, self.high) * step
        return found

    def stored(self, scales: Floats) -> tuple[npt.NDArray[np.float16], Floats]:
        """Return (steps, multiples [groups / count, count, rows])."""
        found = self.multiples(scales)
        return self.step.astype(np.float16), found.reshape(-1, self.count, found.shape[1])


def _sixteenths(w: Floats, blocks: Floats) -> Scales:
    """Fit Q6_K: scales of 16 weights in eight bits of their block's."""
    scale = search.symmetric(w, blocks, 32, integers(-32, 31))
    of_block = scale.reshape(-1, 16, scale.shape[1])
    at = np.abs(of_block).argmax(1, keepdims=True)
    top = np.take_along_axis(of_block, at, 1)[:, 0]
    steps = _Multiples(top / np.float32(-128), 16, -128, 127)

    def stored(grid: Grid) -> Stored:
        d, eighths = steps.stored(grid.scale)
        return {"d": d, "s": eighths.astype(np.int8)}

    values = steps.multiples(scale) * steps.each()
    return Scales(values, None, stored, lambda group, wished, _: steps.allowed(group, wished))


def _lines(last: int) -> Callable[[Floats, Floats], Scales]:
    """Fit Q4_K and Q5_K: scales and minima of 32 weights in six bits of their block's. Both are
    rounded together: the pair next to the best line that loses least."""
    nearest = integers(0, last)

    def fit(w: Floats, blocks: Floats) -> Scales:
        line = search.affine(w, blocks, last)
        tops = [part.reshape(-1, 8, w.shape[1]).max(1) / np.float32(63) for part in line]
        steps = [_Multiples(top, 8, 0, 63) for top in tops]
        whole = [one.multiples(part) for one, part in zip(steps, line, strict=True)]
        near = [
            [np.clip(number + one, 0, 63) for number, one in zip(whole, more, strict=True)]
            for more in itertools.product((0, 1, -1), repeat=2)
        ]
        pairs = np.array(near, np.float32) * np.stack([one.each() for one in steps])
        which = search.among_lines(w, blocks, pairs, nearest)[None]
        scale, least = (np.take_along_axis(pairs[:, at], which, 0)[0] for at in (0, 1))

        def stored(grid: Grid) -> Stored:
            assert grid.offset is not None
            (d, d6), (m, m6) = steps[0].stored(grid.scale), steps[1].stored(-grid.offset)
            return {"d": d, "m": m, "d6": d6.astype(np.uint8), "m6": m6.astype(np.uint8)}

        def allowed(group: int, wished: Floats, offset: bool) -> Floats:
            return -steps[1].allowed(group, -wished) if offset else steps[0].allowed(group, wished)

        return Scales(scale, -least, stored, allowed)

    return fit


def _blocks(codes: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """Return codes [rows · blocks, size] of [rows, in]."""
    return codes.reshape(-1, size)


def _by_row(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the parts [rows · blocks, …] of [blocks, …, rows]."""
    moved = np.moveaxis(part, -1, 0)
    return np.ascontiguousarray(moved).reshape(-1, *moved.shape[2:])


def _half_bytes(part: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(_by_row(part)).view(np.uint8).reshape(-1, 2)


def _nibbles(codes: npt.NDArray[np.uint8], run: int) -> Bytes:
    """Return the low four bits of `run` codes next to those of the following `run`."""
    pairs = codes.reshape(len(codes), -1, 2, run) & 15
    found = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return found.astype(np.uint8, copy=False).reshape(len(codes), -1)


def _high_bits(codes: npt.NDArray[np.uint8]) -> Bytes:
    """Return the fifth bits of 32 codes, the first in the lowest bit."""
    return np.packbits(codes >> 4 & 1, axis=1, bitorder="little")


def _rows(parts: list[Bytes], rows: int) -> Bytes:
    return np.concatenate(parts, axis=1).reshape(rows, -1)


def _pack_q8_0(codes: Floats, stored: Stored) -> Bytes:
    bytes_ = _blocks(codes.astype(np.int8), 32).view(np.uint8)
    return _rows([_half_bytes(stored["d"]), bytes_], len(codes))


def _pack_q4_0(codes: Floats, stored: Stored) -> Bytes:
    found = _blocks((codes + 8).astype(np.uint8), 32)
    return _rows([_half_bytes(stored["d"]), _nibbles(found, 16)], len(codes))


def _pack_q5_0(codes: Floats, stored: Stored) -> Bytes:
    found = _blocks((codes + 16).astype(np.uint8), 32)
    return _rows([_half_bytes(stored["d"]), _high_bits(found), _nibbles(found, 16)], len(codes))


def _pack_iq4_nl(codes: Floats, stored: Stored) -> Bytes:
    found = _blocks(np.searchsorted(NON_LINEAR, codes).astype(np.uint8), 32)
    return _rows([_half_bytes(stored["d"]), _nibbles(found, 16)], len(codes))


def fp4_codes(values: Floats) -> npt.NDArray[np.uint8]:
    """Return the codes of e2m1 numbers: a sign bit above the magnitude's index."""
    codes: Bytes = np.searchsorted(FP4, np.abs(values)).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << 3
    return codes


def _pack_mxfp4(codes: Floats, stored: Stored) -> Bytes:
    found = _nibbles(_blocks(fp4_codes(codes), 32), 16)
    return _rows([_by_row(stored["e"])[:, None], found], len(codes))


def _six_bits(stored: Stored) -> list[Bytes]:
    """Return d, dmin and the 12 bytes of eight scales and minima of six bits each."""
    s, m = _by_row(stored["d6"]), _by_row(stored["m6"])
    low = s[:, :4] | s[:, 4:] >> 4 << 6
    middle = m[:, :4] | m[:, 4:] >> 4 << 6
    high = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    return [_half_bytes(stored["d"]), _half_bytes(stored["m"]), low, middle, high]


def _pack_q4_k(codes: Floats, stored: Stored) -> Bytes:
    found = _blocks(codes.astype(np.uint8), 256)
    return _rows([*_six_bits(stored), _nibbles(found, 32)], len(codes))


def _pack_q5_k(codes: Floats, stored: Stored) -> Bytes:
    found = _blocks(codes.astype(np.uint8), 256)
    fifth = (found >> 4).reshape(len(found), 8, 32)
    high = (fifth << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
    return _rows([*_six_bits(stored), high, _nibbles(found, 32)], len(codes))


def _pack_q6_k(codes: Floats, stored: Stored) -> Bytes:
    found = _blocks((codes + 32).astype(np.uint8), 256)
    fifth = (found >> 4).reshape(len(found), 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (fifth << shifts).sum(2, dtype=np.uint8).reshape(len(found), 64)
    scales = _by_row(stored["s"]).view(np.uint8)
    return _rows([_nibbles(found, 64), high, scales, _half_bytes(stored["d"])], len(codes))


FORMATS = {
    one.name: one
    for one in (
        BlockFormat("Q8_0", 32, _largest, integers(-127, 127), _pack_q8_0, _in_halves),
        BlockFormat("Q6_K", 16, _sixteenths, integers(-32, 31), _pack_q6_k),
        BlockFormat("Q5_K", 32, _lines(31), integers(0, 31), _pack_q5_k),
        BlockFormat("Q4_K", 32, _lines(15), integers(0, 15), _pack_q4_k),
        BlockFormat("Q5_0", 32, _scaled(16), integers(-16, 15), _pack_q5_0, _in_halves),
        BlockFormat("Q4_0", 32, _scaled(8), integers(-8, 7), _pack_q4_0, _in_halves),
        BlockFormat("IQ4_NL", 32, _non_linear, levels(NON_LINEAR), _pack_iq4_nl, _in_halves),
        BlockFormat("MXFP4", 32, _powers, fp4, _pack_mxfp4, _as_powers),
    )
}
assert all(BY_NAME[name].block % one.size == 0 for name, one in FORMATS.items())

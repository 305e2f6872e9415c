"""Large biases of keys, left out of int8 codes and added back when a key is read.

Some models (Qwen2 and 2.5) have biases of up to hundreds in a few numbers of every key, while the
token's own part is about one. With a scale for the biases, a handful of levels remain for the rest
(3.5 % of perplexity of the default model, all of it from K). A bias is the same for every token,
and its rotation at a position is known: R_p (W x + b) = R_p W x + R_p b. So codes hold R_p W x, and
a reader of the key at position p adds R_p b.

Large biases are selected once, at load; small ones stay in the codes, where they cost nothing.
Positions are rotated from tile to tile: R_(s + j) b = R_j (R_s b), and the table of R_j for a
tile's positions fits into a core's first cache. The kernels add q · R_p b to the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..base.graph import AttentionSpec
from .arrays import floats
from .prepared import RopeTable

LARGE = 10.0
"""Least length of a pair of biases (a plane of the rotation) that is left out. With it a level of
the codes would be at least 0.08, where a token adds about one. Leaving out smaller ones, too,
improves perplexity by less than the noise, and reads slower (ADR 0017)."""
TILE = 64
"""Positions whose rotations are tabulated: a tile of csrc/tiles.h."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KeyBias:
    """Biases left out of the int8 keys of one layer."""

    values: Floats
    """[G, E], zero where the bias is small and stays in the codes."""
    rope: RopeTable | None
    """The layer's rotation table; None: positions do not rotate it."""
    interleaved: bool
    """Whether pairs are (2i, 2i + 1), else (i, i + rotated / 2)."""
    turns: Floats
    """[2, E, `TILE`]: cosine and sine of each number's rotation at position j of a tile, relative
    to its first position; 1 and 0 if it is not rotated."""

    def at(self, positions: npt.NDArray[np.int64]) -> Floats:
        """Return [G, n, E]: the biases rotated to each of the positions [n]. Positions after the
        table's end get arbitrary values, since they have no tokens."""
        values = self.values[:, None]
        if self.rope is None:
            return np.repeat(values, len(positions), 1)
        cos, sin = floats(self.rope.cos), floats(self.rope.sin)
        size, rotated = self.values.shape[1], 2 * cos.shape[1]
        positions = positions.clip(max=len(cos) - 1)
        angle, low = _angles(size, rotated, interleaved=self.interleaved)
        partner = partners(size, rotated, interleaved=self.interleaved)
        still = np.arange(size) >= rotated
        c = np.where(still, 1, cos[positions][:, angle])
        s = np.where(still, 0, sin[positions][:, angle])
        turned: Floats = values * c + values[..., partner] * np.where(low, -s, s)
        return turned

    def planes(self) -> Floats:
        """Return [G, P, 3] for heads whose halves are rotated: for each plane with a bias, its
        first number's index in the head, and both biases. Heads with fewer than P planes are padded
        with zeros."""
        low, high = np.split(self.values, 2, 1)
        has = (low != 0) | (high != 0)
        first = np.argsort(~has, 1, kind="stable")[:, : has.sum(1).max()]
        found: Floats = np.stack(
            [first, *(np.take_along_axis(x, first, 1) for x in (low, high))], 2
        )
        return found.astype(np.float32)


def key_bias(bias: Floats, rope: RopeTable | None, spec: AttentionSpec) -> KeyBias | None:
    """Return the biases to leave out of keys that have biases [G, E]; None: all are small."""
    rotated = 0 if rope is None else 2 * rope.cos.shape[1]
    pairs = spec.rope is not None and spec.rope.interleaved
    partner = partners(spec.size, rotated, interleaved=pairs)
    large = np.hypot(bias, np.where(partner == np.arange(spec.size), 0, bias[:, partner])) > LARGE
    if not large.any():
        return None
    values = np.ascontiguousarray(np.where(large, bias, 0), np.float32)
    return KeyBias(values, rope, pairs, _turns(rope, spec.size, interleaved=pairs))


def partners(size: int, rotated: int, *, interleaved: bool) -> npt.NDArray[np.int64]:
    """Return [E]: the number that each number of a head is rotated with; itself if it is not."""
    at = np.arange(size)
    other = at ^ 1 if interleaved else (at + rotated // 2) % max(rotated, 1)
    return np.where(at < rotated, other, at)


def _angles(
    size: int, rotated: int, *, interleaved: bool
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return for each number [E] the column of its angle in the table (0 if it is not rotated), and
    whether it is the first of its pair."""
    at, half = np.arange(size), max(rotated // 2, 1)
    angle = at // 2 if interleaved else at % half
    return np.where(at < rotated, angle, 0), at % 2 == 0 if interleaved else at < half


def _turns(rope: RopeTable | None, size: int, *, interleaved: bool) -> Floats:
    turns = np.zeros((2, size, TILE), np.float32)
    turns[0] = 1
    if rope is None:
        return turns
    rotated = 2 * rope.cos.shape[1]
    # A table may be scaled as a whole (YaRN); its first row, of angle zero, has the factor.
    factor = floats(rope.cos[:1])
    angle, _ = _angles(size, rotated, interleaved=interleaved)
    for table, to in zip((rope.cos, rope.sin), turns, strict=True):
        rows = (floats(table[:TILE]) / factor).T
        to[:rotated, : rows.shape[1]] = rows[angle[:rotated]]
    return turns

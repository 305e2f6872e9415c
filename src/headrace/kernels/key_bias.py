"""Large biases of keys, left out of int8 codes and added back when a key is read.

Some models (Qwen2 and 2.5) give a few numbers of every key biases of up to hundreds, while the
token's own part is about one. A scale that has to reach them leaves the rest a handful of levels
(3.5 % of perplexity of the default model, all of it from K). A bias is the same for every token,
and its rotation at a position is known: R_p (W x + b) = R_p W x + R_p b. So codes hold R_p W x, and
a reader of the key at position p adds R_p b.

Numbers with a large bias are chosen once, when the model is loaded; the others stay in their codes,
where they cost nothing. Positions are turned from tile to tile: R_(s + j) b = R_j (R_s b), and the
table of R_j for the positions of a tile is small enough for a core's first cache. The kernels add q
· R_p b to the scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..base.graph import AttentionSpec
from .arrays import floats
from .prepared import RopeTable

LARGE = 10.0
"""Least length of a pair of biases, one of the rotation's planes, that is left out. A level of the
codes would then be at least 0.08, compared with about one that a token adds. Leaving out smaller
ones too gains no perplexity above the noise, and takes longer to read (ADR 0017)."""
TILE = 64
"""Positions whose turns are kept: a tile of csrc/tiles.h."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KeyBias:
    """Biases that the int8 keys of one layer are kept without."""

    values: Floats
    """[G, E], zero where the bias is small and stays in the codes."""
    rope: RopeTable | None
    """The layer's rotation table; None: positions do not rotate it."""
    interleaved: bool
    """Whether pairs are (2i, 2i + 1), else (i, i + rotated / 2)."""
    turns: Floats
    """[2, E, `TILE`]: cosine and sine of the angle by which position j of a tile turns each number,
    relative to the tile's first position; 1 and 0 where nothing is rotated."""

    def at(self, positions: npt.NDArray[np.int64]) -> Floats:
        """Return [G, n, E]: the biases rotated to each of the positions [n]. Positions after the
        table's end get arbitrary values, since no token lies there."""
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
        first number's index in the head, and both biases. Heads with fewer than P planes end in
        zeros."""
        low, high = np.split(self.values, 2, 1)
        has = (low != 0) | (high != 0)
        first = np.argsort(~has, 1, kind="stable")[:, : has.sum(1).max()]
        found: Floats = np.stack(
            [first, *(np.take_along_axis(x, first, 1) for x in (low, high))], 2
        )
        return found.astype(np.float32)


def key_bias(bias: Floats, rope: RopeTable | None, spec: AttentionSpec) -> KeyBias | None:
    """Return the biases to leave out of keys that have biases [G, E]; None: all of them are
    small."""
    rotated = 0 if rope is None else 2 * rope.cos.shape[1]
    pairs = spec.rope is not None and spec.rope.interleaved
    partner = partners(spec.size, rotated, interleaved=pairs)
    large = np.hypot(bias, np.where(partner == np.arange(spec.size), 0, bias[:, partner])) > LARGE
    if not large.any():
        return None
    values = np.ascontiguousarray(np.where(large, bias, 0), np.float32)
    return KeyBias(values, rope, pairs, _turns(rope, spec.size, interleaved=pairs))


def partners(size: int, rotated: int, *, interleaved: bool) -> npt.NDArray[np.int64]:
    """Return [E]: the number of the head that each is rotated with; itself if it is not."""
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
    # A table may be scaled as a whole (YaRN); its first row, of angle zero, says by how much.
    factor = floats(rope.cos[:1])
    angle, _ = _angles(size, rotated, interleaved=interleaved)
    for table, to in zip((rope.cos, rope.sin), turns, strict=True):
        rows = (floats(table[:TILE]) / factor).T
        to[:rotated, : rows.shape[1]] = rows[angle[:rotated]]
    return turns

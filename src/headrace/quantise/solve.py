"""Rounding onto a fixed grid, column by column, each column's error carried into the later ones.

GPTQ (2210.17323) with activation order: the columns that the text uses most come first. The grid is
fixed before, by `search`, so that the order of the columns costs no format anything ("static
groups"). With H = G + λ the factor U, upper, of H⁻¹ = UᵀU is the inverse of R in H = R · Rᵀ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
DAMPING = 0.01
"""Share of the mean diagonal that is added to the diagonal of G."""
BLOCK = 64
"""Columns that are rounded before their errors reach all later ones."""
SLICE = 1 << 23
"""Weights that are rounded at once."""
SWEEPS = 2
LEAF = 128
"""Size below which a triangle is inverted as a whole."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that a matrix [rows, in] may take: scale · code + offset of each group."""

    size: int
    """Inputs of a group."""
    scale: Floats
    """[groups, rows]."""
    offset: Floats | None
    """[groups, rows]; None: 0."""
    nearest: Callable[[Floats], Floats]
    """Values of the codes nearest to scaled weights."""
    allowed: Callable[[int, Floats, bool], Floats] | None = None
    """Function from a group, wished scales [rows], and whether they are offsets, to those next to
    them that the file can store; None: scales stay as they were fitted."""

    def values(self, codes: Floats) -> Floats:
        """Return the weights [rows, in] of codes [rows, in]; the last group may be narrower."""
        width = codes.shape[1]
        scale = np.repeat(self.scale, self.size, 0)[:width].T
        if self.offset is None:
            return codes * scale
        return codes * scale + np.repeat(self.offset, self.size, 0)[:width].T

    def round(self, w: Floats) -> Floats:
        """Return the nearest codes [rows, in] of weights [rows, in]."""
        turned = np.ascontiguousarray(w.T)
        codes = np.empty_like(turned)
        for group in range(len(self.scale)):
            columns = slice(group * self.size, (group + 1) * self.size)
            codes[columns] = self._codes(turned[columns], group)
        return np.ascontiguousarray(codes.T)

    def _codes(self, w: Floats, group: int) -> Floats:
        """Return the nearest codes of weights […, rows] of one group."""
        scale = self.scale[group]
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        if self.offset is not None:
            w = w - self.offset[group]
        return self.nearest(w * inverse)


def factor(gram: Floats, damping: float = DAMPING) -> Floats:
    """Return U [in, in], upper, with UᵀU = (G + λ)⁻¹; λ grows until the factor exists."""
    mean = float(np.diagonal(gram).mean()) or 1.0
    turned = gram[::-1, ::-1].copy()
    at = np.arange(len(gram))
    turned[at, at] += np.float32(damping * mean)
    for _ in range(8):
        try:
            lower = np.linalg.cholesky(turned)
        except np.linalg.LinAlgError:
            turned[at, at] += np.float32(damping * mean)
            damping *= 4
            continue
        return np.ascontiguousarray(_inverse(lower)[::-1, ::-1])
    raise ArithmeticError("the statistic has no factor")


def _inverse(lower: Floats) -> Floats:
    """Invert a lower triangle by halves: a third of the work of a general inverse."""
    size = len(lower)
    if size <= LEAF:
        return np.tril(np.linalg.inv(lower))
    half = size // 2
    first, second = _inverse(lower[:half, :half]), _inverse(lower[half:, half:])
    found = np.zeros_like(lower)
    found[:half, :half], found[half:, half:] = first, second
    found[half:, :half] = -(second @ lower[half:, :half]) @ first
    return found


class Solver:
    """GPTQ on one statistic, for all matrices that multiply its input."""

    def __init__(self, gram: Floats) -> None:
        self.gram = gram
        self._order = np.argsort(-np.diagonal(gram), kind="stable")
        self._upper = factor(gram[np.ix_(self._order, self._order)])

    def codes(self, w: Floats, grid: Grid) -> Floats:
        """Return codes [rows, in] of weights [rows, in] whose error on the text is small."""
        order, upper = self._order, self._upper
        left = np.ascontiguousarray(w.T[order])
        codes = np.empty_like(left)
        scale = grid.scale
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
        width = len(left)
        errors = np.empty((BLOCK, left.shape[1]), np.float32)
        for first in range(0, width, BLOCK):
            last = min(first + BLOCK, width)
            for at in range(first, last):
                group = order[at] // grid.size
                offset = 0 if grid.offset is None else grid.offset[group]
                codes[at] = found = grid.nearest((left[at] - offset) * inverse[group])
                error = errors[at - first]
                np.subtract(left[at], found * scale[group] + offset, out=error)
                error /= upper[at, at]
                left[at + 1 : last] -= upper[at, at + 1 : last, None] * error
            left[last:] -= upper[first:last, last:].T @ errors[: last - first]
        found = np.empty_like(codes)
        found[order] = codes
        return np.ascontiguousarray(found.T)

    def settled(self, w: Floats, codes: Floats, grid: Grid) -> tuple[Floats, Grid]:
        """Return codes and their grid after `SWEEPS` passes in which each scale, then each column
        of codes, takes the value that is best for all others as they are (cyclic descent, as of
        2309.01885): the error on the text falls."""
        gram, order = self.gram, self._order
        found = np.ascontiguousarray(codes.T)
        off = np.ascontiguousarray((grid.values(codes) - w).T)
        power = np.diagonal(gram)
        inverse = np.divide(1, power, out=np.zeros_like(power), where=power > 0)
        for _ in range(SWEEPS):
            grid = self._rescaled(off, found, grid)
            scales = grid.scale
            shrink = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
            for first in range(0, len(off), BLOCK):
                some = order[first : first + BLOCK]
                pull, square = gram[some] @ off, gram[np.ix_(some, some)]
                for number, at in enumerate(some):
                    group = at // grid.size
                    better = found[at] - pull[number] * inverse[at] * shrink[group]
                    better = grid.nearest(better)
                    change = (better - found[at]) * scales[group]
                    found[at] = better
                    off[at] += change
                    later = slice(number + 1, None)  # No other row is read again.
                    pull[later] += square[later, number, None] * change
        return np.ascontiguousarray(found.T), grid

    def _rescaled(self, off: Floats, codes: Floats, grid: Grid) -> Grid:
        """Return the grid with scales and offsets that are best for codes [in, rows]; `off`
        [in, rows] becomes their error."""
        if grid.allowed is None:
            return grid
        parts = [one.copy() for one in (grid.scale, grid.offset) if one is not None]
        ones = np.ones((grid.size, 1), np.float32)
        for group in range(len(grid.scale)):
            columns = slice(group * grid.size, (group + 1) * grid.size)
            pull, square = self.gram[columns] @ off, self.gram[columns, columns]
            for number, part in enumerate(parts):
                along = codes[columns] if number == 0 else ones
                moved = square @ along
                slope, bend = (pull * along).sum(0), (moved * along).sum(0)
                with np.errstate(over="ignore", invalid="ignore"):
                    step = np.divide(slope, bend, out=np.zeros_like(slope), where=bend > 0)
                    better = grid.allowed(group, part[group] - step, number == 1)
                    change = better - part[group]
                    falls = change * (2 * slope + change * bend) < 0
                change = np.where(falls, change, 0)
                part[group] = np.where(falls, better, part[group])
                off[columns] += along * change
                pull += moved * change
        return replace(grid, scale=parts[0], offset=None if grid.offset is None else parts[1])


def loss(off: Floats, gram: Floats) -> float:
    """Return tr(ΔW G ΔWᵀ): the squared error of a product on the text, ΔW [rows, in]."""
    return float(np.einsum("oi,oi->", off @ gram, off, dtype=np.float64))

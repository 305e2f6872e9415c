"""Codes of another format for the same numbers, found from the scales that they had.

A group of numbers moves without loss if a scale of its old format, or a small power of two times
it, is one that the new format stores, and every number is then one of its codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .blocks import Fitted
from .solve import Floats, Grid

MULTIPLES = (1.0, 2.0, 0.5, 4.0, 0.25)
STEPS = 16
"""Last code that the largest of numbers without scales is tried as."""


class OnGrid(NamedTuple):
    """Numbers of a matrix, and the grid that they lay on."""

    values: Floats
    """[rows, in]."""
    scales: Floats | None = None
    """[groups, rows]; None: the matrix was dense."""
    zeros: Floats | None = None
    """[groups, rows]: code of the number zero; None: 0."""


def regrouped(parts: Floats, count: int) -> Floats | None:
    """Return scales [count, rows] of `parts` [groups, rows] for groups of another length: each
    repeated, or the smallest of several; None if groups overlap."""
    groups = len(parts)
    if count % groups == 0:
        return np.repeat(parts, count // groups, 0)
    if groups % count:
        return None
    each = parts.reshape(count, groups // count, -1)
    at = np.where(each != 0, np.abs(each), np.inf).argmin(1)[:, None]
    found: Floats = np.take_along_axis(each, at, 1)[:, 0]
    return found


def exact(
    held: OnGrid, count: int, given: Callable[[Floats, Floats | None], Fitted]
) -> tuple[Floats, Fitted] | None:
    """Return codes [rows, in] of a format of `count` groups a row, and its grid; None if a number
    would change. `given`: the grid of wished scales and zero points."""
    w = held.values
    scales = None if held.scales is None else regrouped(held.scales, count)
    if held.scales is not None and scales is None:
        return None
    zeros = None if held.zeros is None else regrouped(held.zeros, count)
    if scales is None:
        grouped = w.reshape(len(w), count, -1)
        at = np.abs(grouped).argmax(-1)[..., None]
        top = np.take_along_axis(grouped, at, -1)[..., 0].T
        candidates = [-top / np.float32(code) for code in range(STEPS, 0, -1)]
    else:
        candidates = [scales * np.float32(one) for one in MULTIPLES]
    best = candidates[0]
    found = np.zeros(best.shape, np.bool_)
    for candidate in candidates:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            same = _same(given(candidate, zeros).grid, w, count)
        best = np.where(same & ~found, candidate, best)
        found |= same
        if found.all():
            break
    if not found.all():
        return None
    fitted = given(best, zeros)
    codes = fitted.grid.round(w)
    return (codes, fitted) if _same(fitted.grid, w, count).all() else None


def _same(grid: Grid, w: Floats, count: int) -> npt.NDArray[np.bool_]:
    """Return which groups [count, rows] of w the grid holds exactly."""
    equal = grid.values(grid.round(w)) == w
    found: npt.NDArray[np.bool_] = equal.reshape(len(w), count, -1).all(-1).T
    return found

"""One matrix rounded to a grid by the statistic of its input, and its error on the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .solve import SLICE, Floats, Grid, loss
from .statistic import Statistic

ROWS = 128
"""A slice begins at a multiple of this row: blocks of fp8 and packed zero points are whole."""


@dataclass(slots=True)
class ProductErrors:
    """Squared errors of products on the text, summed over matrices."""

    exact: float = 0.0
    """The products themselves."""
    nearest: float = 0.0
    """Error of rounding each weight to the nearest."""
    kept: float = 0.0
    """Error of the rounding that was kept."""
    rows: int | None = None
    """Rows of the statistic, of the matrix that has the fewest; 0: no text."""

    def said(self) -> dict[str, float | int]:
        """Return relative errors, as plain JSON."""
        rows = self.rows or 0
        if not self.exact:
            return {"rows": rows}
        shares = {"nearest": self.nearest / self.exact, "error": self.kept / self.exact}
        return {"rows": rows, **{name: float(f"{one:.4g}") for name, one in shares.items()}}


@dataclass(slots=True)
class Rounding:
    """Rounding of one tensor's matrices."""

    errors: ProductErrors = field(default_factory=ProductErrors)

    def slices(self, w: Floats, statistic: Statistic | None) -> Iterator[tuple[slice, Floats]]:
        """Yield some rows of w [rows, in] after the other, as many as are rounded at once."""
        step = max(ROWS, SLICE // w.shape[1] // ROWS * ROWS)
        for first in range(0, len(w), step):
            rows = slice(first, first + step)
            yield rows, np.ascontiguousarray(w[rows], np.float32)
        count = 0 if statistic is None else statistic.count
        known = self.errors.rows
        self.errors.rows = count if known is None else min(known, count)

    def codes(self, w: Floats, grid: Grid, statistic: Statistic | None) -> tuple[Floats, Grid]:
        """Return codes [rows, in] and their grid: those of GPTQ, unless rounding to the nearest on
        the given grid loses less on the text; without a statistic the nearest."""
        nearest = grid.round(w)
        if statistic is None:
            return nearest, grid
        gram = statistic.gram
        solver = statistic.solver()
        solved = solver.settled(w, solver.codes(w, grid), grid)
        both = (nearest, grid), solved
        found = [loss(one.values(codes) - w, gram) for codes, one in both]
        self.errors.exact += loss(w, gram)
        self.errors.nearest += found[0]
        self.errors.kept += min(found)
        return solved if found[1] <= found[0] else both[0]

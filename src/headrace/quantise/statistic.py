"""The statistic of calibration: the Gram matrix of a product's input.

All methods read it. GPTQ needs G = XᵀX itself (2210.17323); an error of rounded weights on the text
is tr(ΔW G ΔWᵀ), so a search needs no forward pass; llama.cpp's importance matrix is the diagonal;
SmoothQuant (2211.10438) reads the largest magnitude of each column. Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .solve import Floats, Solver

SOME = 64
"""Rows that a statistic keeps, at most."""
Windows = Sequence[npt.NDArray[np.int64]]
"""Tokens of each window of the text; every window is a sequence of its own."""


@dataclass(slots=True)
class Statistic:
    """Sums over the rows of one product's input."""

    count: int
    """Rows: tokens, or those of an expert."""
    gram: Floats
    """[in, in]: XᵀX, summed in the order of the chunks."""
    top: Floats
    """[in]: largest magnitude of each column."""
    some: Floats
    """[≤ SOME, in]: some of the rows, to see how their own rounding errs."""

    _solver: Solver | None = None

    def solver(self) -> Solver:
        """Return its solver, made once: tensors that read the same input share the statistic."""
        if self._solver is None:
            self._solver = Solver(self.gram)
        return self._solver

    @classmethod
    def empty(cls, width: int) -> Statistic:
        square, vector = (np.zeros(shape, np.float32) for shape in ((width, width), (width,)))
        return cls(0, square, vector, np.zeros((0, width), np.float32))

    def add(self, x: Floats) -> None:
        """Add the rows x [n, in]."""
        self.count += len(x)
        self.gram += x.T @ x
        if len(x) and len(self.some) < SOME:
            step = max(1, len(x) // SOME)
            self.some = np.concatenate([self.some, x[::step]])[:SOME]
        if len(x):
            np.maximum(self.top, np.abs(x).max(axis=0), out=self.top)

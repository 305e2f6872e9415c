"""A tensor that is made smaller, as calibration sees it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from .folding import Factors
from .statistic import Statistic

Stats = Sequence[Statistic | None]
Encoded = tuple[Iterable[npt.NDArray[Any]], dict[str, Any]]


class Quantisable(Protocol):
    """One tensor of the file that is made smaller."""

    @property
    def file_name(self) -> str:
        """Its name in the file: also in the record."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names of the matrices that it holds, one below the other."""
        ...

    @property
    def width(self) -> int:
        """Columns of a matrix."""
        ...

    @property
    def matrices(self) -> int:
        """Number of its matrices that have a statistic of their own: experts, or 1."""
        ...

    def encode(self, stats: Stats, factors: Factors | None = None) -> Encoded:
        """Round it by the statistic of each name (None: no text reached it). `factors`: of its
        columns, for which the statistics are, and of its rows. Returns the bytes to write, in
        order, and what to say of it: plain JSON."""
        ...

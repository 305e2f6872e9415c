"""What nodes at which ranks meet are told: see `base.cut`."""

from __future__ import annotations

from typing import NamedTuple


class ExchangeSpec(NamedTuple):
    """Ranks make whole a value of which each has columns. Nothing is summed."""

    bounds: tuple[int, ...]
    """Rank r has the columns from `bounds[r]` to `bounds[r + 1]`."""
    rank: int

    @property
    def mine(self) -> tuple[int, int]:
        """(first, how many) of this rank's columns."""
        first, end = self.bounds[self.rank :][:2]
        return first, end - first

"""Specs of nodes at which ranks meet: see `base.cut` and `base.sums`."""

from __future__ import annotations

from typing import NamedTuple


class ExchangeSpec(NamedTuple):
    """An all-gather: ranks combine their columns of a value. Nothing is summed."""

    bounds: tuple[int, ...]
    """Rank r has the columns from `bounds[r]` to `bounds[r + 1]`."""
    rank: int

    @property
    def mine(self) -> tuple[int, int]:
        """(first, count) of this rank's columns."""
        first, end = self.bounds[self.rank :][:2]
        return first, end - first


class ReduceSpec(NamedTuple):
    """An all-reduce: ranks add up their partial sums."""

    ranks: int

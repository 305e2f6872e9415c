"""The rows of the worker's tables: lowest free first, so that the rows in use stay together."""

from __future__ import annotations

from heapq import heappop, heappush


class Rows:
    __slots__ = ("_free", "_released", "_total")

    def __init__(self, total: int) -> None:
        self._total = total
        self._free = list(range(total))
        self._released: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return heappop(self._free)

    def give_back(self, row: int) -> None:
        heappush(self._free, row)
        self._released.append(row)

    def take_released(self) -> list[int]:
        """Return the rows given back since the last call, for the next plan to report to the
        worker."""
        released, self._released = self._released, []
        return released

    def check_integrity(self, held: set[int]) -> None:
        free = set(self._free)
        assert len(free) == len(self._free)
        assert not free & held
        assert free | held == set(range(self._total))

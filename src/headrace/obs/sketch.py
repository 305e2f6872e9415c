"""Quantiles of the last seconds: a histogram with bins of equal ratio, never reset.

Bins grow by a fixed factor, so a quantile is accurate to within half of it at any scale (the idea
of DDSketch). Counts are never reset: a window is the difference of two snapshots. So any number of
readers can have their own windows, and counting costs one logarithm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SMALLEST = 1e-5
GROWTH = 1.04
BINS = 540
"""Number of bins, from 10 µs to four hours; values outside count in the first or the last bin."""

_SCALE = 1.0 / math.log(GROWTH)
_SHIFT = math.log(SMALLEST)


class Sketch:
    """Counts of values in seconds. Belongs to one thread."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * BINS

    def observe(self, value: float, times: int = 1) -> None:
        place = int((math.log(value) - _SHIFT) * _SCALE) if value > SMALLEST else 0
        self.counts[place if place < BINS else BINS - 1] += times


def quantiles(later: Sequence[int], earlier: Sequence[int], *shares: float) -> list[float] | None:
    """Return the quantiles, in seconds, of the values between two snapshots; None without any.

    A quantile is the geometric mean of its bin's bounds: at most 2 % off.
    """
    counts = [new - old for new, old in zip(later, earlier, strict=True)]
    total = sum(counts)
    if not total:
        return None
    found = []
    for share in shares:
        wanted, seen, place = max(1, math.ceil(share * total)), 0, 0
        for place, count in enumerate(counts):  # noqa: B007
            seen += count
            if seen >= wanted:
                break
        found.append(SMALLEST * GROWTH ** (place + 0.5))
    return found

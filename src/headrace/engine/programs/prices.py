"""Measured lengths of a program's runs, by the shapes of their inputs."""

from __future__ import annotations

from collections import OrderedDict

from ...programs.runner import Shapes, covers

MOST_BUCKETS = 256
"""Sets of shapes whose lengths are kept: those used last."""
NEWEST = 0.1
"""Weight of the newest run in the usual length."""
FORGOTTEN = 0.01
"""Share of its distance to the usual length that the worst one loses with each run."""


class RunPrices:
    """Seconds from a run's begin to its answer. The first run of a bucket only warms it up."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[Shapes, list[float]] = OrderedDict()
        """Shapes → usual and worst length; empty: it has run once."""

    def observe(self, shapes: Shapes, seconds: float) -> None:
        found = self._buckets.get(shapes)
        if found is None:
            self._buckets[shapes] = []
            if len(self._buckets) > MOST_BUCKETS:
                self._buckets.popitem(last=False)
            return
        self._buckets.move_to_end(shapes)
        if not found:
            found += [seconds, seconds]
        found[0] += NEWEST * (seconds - found[0])
        found[1] = max(seconds, found[1] - FORGOTTEN * (found[1] - found[0]))

    def exceeded(self, shapes: Shapes, seconds: float) -> None:
        """Note that a run was stopped after `seconds`."""
        usual, worst = self._buckets.get(shapes) or (0.0, 0.0)
        self._buckets[shapes] = [max(seconds, usual), max(seconds, worst)]

    def usual(self, shapes: Shapes) -> float | None:
        """Return the usual length; None: not known."""
        return self._of(shapes, 0)

    def worst(self, shapes: Shapes) -> float | None:
        """Return the longest length of late; None: not known."""
        return self._of(shapes, 1)

    @property
    def longest(self) -> float:
        """The worst length over all shapes."""
        return max((one[1] for one in self._buckets.values() if one), default=0.0)

    def _of(self, shapes: Shapes, which: int) -> float | None:
        """Return the value of the bucket, else the least of those as large in every dimension."""
        own = self._buckets.get(shapes)
        if own:
            return own[which]
        covering = (one for key, one in self._buckets.items() if one and covers(key, shapes))
        return min((one[which] for one in covering), default=None)

"""Measured lengths of a program's runs, by the shapes of their inputs."""

from __future__ import annotations

import math
from collections import OrderedDict

from ...programs.measured import Shapes, covers

MOST_BUCKETS = 256
"""Most sets of shapes whose lengths are kept: the last used ones."""
NEWEST = 0.1
"""Weight of the newest run in the usual length."""
PROBED = 0.9
"""Factor on the usual length each time a run is refused because of it."""
FORGOTTEN = 0.01
"""Share of its distance to the usual length that the worst length loses with each run."""


class RunPrices:
    """Seconds from start to answer of a run. The first run of a bucket is a warm-up."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[Shapes, list[float]] = OrderedDict()
        """Shapes → usual and worst length, and when it ran last; empty: it has run once."""

    def observe(self, shapes: Shapes, seconds: float, now: float = 0.0) -> None:
        found = self._buckets.get(shapes)
        if found is None:
            self._buckets[shapes] = []
            if len(self._buckets) > MOST_BUCKETS:
                self._buckets.popitem(last=False)
            return
        self._buckets.move_to_end(shapes)
        if not found:
            found += [seconds, seconds, now]
        found[0] += NEWEST * (seconds - found[0])
        found[1] = max(seconds, found[1] - FORGOTTEN * (found[1] - found[0]))
        found[2] = now

    def exceeded(self, shapes: Shapes, seconds: float, now: float = 0.0) -> None:
        """Note that a run was stopped after `seconds`: its length is at least that."""
        own = self._buckets.get(shapes)
        self.observe(shapes, max(seconds, own[0]) if own else seconds, now)

    def refused(self, shapes: Shapes) -> None:
        """Lower the usual length that refused a run, so that a later run is started and measures it
        again."""
        if found := self._bucket(shapes):
            found[0] *= PROBED

    def usual(self, shapes: Shapes) -> float | None:
        """Return the usual length; None: unknown."""
        return self._of(shapes, 0)

    def own(self, shapes: Shapes) -> float | None:
        """Return the usual length of runs of exactly these shapes; None: unknown."""
        found = self._buckets.get(shapes)
        return found[0] if found else None

    def worst(self, shapes: Shapes) -> float | None:
        """Return the longest recent length; None: unknown."""
        return self._of(shapes, 1)

    @property
    def longest(self) -> float:
        """The worst length over all shapes."""
        return self.longest_since(-math.inf)

    def longest_since(self, moment: float) -> float:
        """Return the worst length over the shapes that ran since then."""
        ran = (one for one in self._buckets.values() if one and one[2] >= moment)
        return max((one[1] for one in ran), default=0.0)

    def _of(self, shapes: Shapes, which: int) -> float | None:
        found = self._bucket(shapes, which)
        return found[which] if found else None

    def _bucket(self, shapes: Shapes, which: int = 0) -> list[float] | None:
        """Return the bucket, else the smallest of those at least as large in every dimension."""
        if own := self._buckets.get(shapes):
            return own
        covering = (one for key, one in self._buckets.items() if one and covers(key, shapes))
        return min(covering, key=lambda one: one[which], default=None)

"""Metrics of encodings of inputs that are not text."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from ..base.encodings import EncodingStats
from .instruments import Exposition, Labelled


class EncodingMetrics:
    """Sum of the counts of successive engines; each begins at zero."""

    def __init__(self) -> None:
        self._stats: EncodingStats | None = None
        self._was = EncodingStats()
        self._ends = Labelled("computed", "shared", "failed")
        self._seconds = 0.0

    def now(self, stats: EncodingStats) -> None:
        """Take the engine's counts after a step."""
        was, self._was = self._was, stats
        for name in ("computed", "shared", "failed"):
            self._ends.add(name, getattr(stats, name) - getattr(was, name))
        self._seconds += stats.seconds - was.seconds
        self._stats = stats

    def restart(self) -> None:
        """Start over: a new engine process counts from zero."""
        self._was = EncodingStats()

    def families(self, x: Exposition) -> Iterator[Metric]:
        """Yield all of them, as they are now; none for a model without an encoder."""
        stats = self._stats
        if stats is None:
            return
        yield from x.counters(
            "Encodings: computed, used once more by another request, or failed.",
            "end",
            self._ends,
            "headrace:encodings",
        )
        yield from x.counter("Time of their slices.", self._seconds, "headrace:encodings_seconds")
        yield from x.gauge(
            "Encodings that are wanted and not complete.",
            stats.waiting,
            "headrace:encodings_waiting",
        )
        yield from x.gauge(
            "Bytes of encodings, reserved or kept.", stats.bytes, "headrace:encodings_bytes"
        )

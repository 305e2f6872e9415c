"""Counters that cost a fraction of a microsecond, exposed as Prometheus families on a scrape.

The library's instruments cost microseconds per observation (locks, label look-ups). This adds up at
ten thousand tokens a second, and an alias must be observed separately. Here one thread counts a
value once, and all its names read the same numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

OTHER = "other"


class Histogram:
    """Counts per bucket; bounds are upper and inclusive, as in Prometheus."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        names = [*map(_bound, self.bounds), "+Inf"]
        return list(zip(names, accumulate(map(float, self.counts)), strict=True))


class Labelled:
    """Counters by the value of one label, at most `most`; further values count as `other`."""

    __slots__ = ("_most", "values")

    def __init__(self, *known: str, most: int = 100) -> None:
        """Expose `known` values from the start, as 0."""
        self.values: dict[str, float] = dict.fromkeys(known, 0.0)
        self._most = most

    def add(self, value: str, amount: float = 1.0) -> None:
        if value not in self.values and len(self.values) >= self._most:
            value = OTHER
        self.values[value] = self.values.get(value, 0.0) + amount


class Exposition:
    """Maker of metric families with the labels common to one engine."""

    def __init__(self, **labels: str) -> None:
        self._names = list(labels)
        self._values = list(labels.values())

    def gauge(self, help_: str, value: float, *names: str) -> Iterator[Metric]:
        for name in names:
            family = GaugeMetricFamily(name, help_, labels=self._names)
            family.add_metric(self._values, value)
            yield family

    def gauges(
        self, help_: str, label: str, values: dict[str, float], *names: str
    ) -> Iterator[Metric]:
        for name in names:
            family = GaugeMetricFamily(name, help_, labels=[*self._names, label])
            for key, value in values.items():
                family.add_metric([*self._values, key], value)
            yield family

    def info(self, help_: str, name: str, labels: dict[str, str]) -> Iterator[Metric]:
        """Yield a gauge of 1 whose labels are the message."""
        family = GaugeMetricFamily(name, help_, labels=[*self._names, *labels])
        family.add_metric([*self._values, *labels.values()], 1.0)
        yield family

    def counter(self, help_: str, value: float, *names: str) -> Iterator[Metric]:
        """Yield counters; names are without `_total`, which the exposition adds."""
        for name in names:
            family = CounterMetricFamily(name, help_, labels=self._names)
            family.add_metric(self._values, value)
            yield family

    def counters(self, help_: str, label: str, values: Labelled, *names: str) -> Iterator[Metric]:
        for name in names:
            family = CounterMetricFamily(name, help_, labels=[*self._names, label])
            for key, value in sorted(values.values.items()):
                family.add_metric([*self._values, key], value)
            yield family

    def histogram(self, help_: str, histogram: Histogram, *names: str) -> Iterator[Metric]:
        buckets = histogram.buckets()
        for name in names:
            family = HistogramMetricFamily(name, help_, labels=self._names)
            family.add_metric(self._values, buckets, histogram.total)
            yield family


def _bound(value: float) -> str:
    """Format a bound as the Prometheus clients write it: `1.0`, `0.001`."""
    return repr(float(value))


def one_two_five(most: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50 … up to `most`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for factor in (1, 2, 5):
            if factor * scale > most:
                return bounds
            bounds.append(float(factor * scale))
        scale *= 10

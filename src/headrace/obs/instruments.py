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

    __slots__ = ("bounds", "counts", "help", "names", "total")

    def __init__(self, bounds: Sequence[float], names: str, help_: str) -> None:
        """`names`: those of the series, with spaces between them."""
        self.names, self.help = names.split(), help_
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

    __slots__ = ("_most", "help", "label", "name", "values")

    def __init__(self, name: str, label: str, help_: str, *known: str, most: int = 100) -> None:
        """Expose `known` values from the start, as 0."""
        self.name, self.label, self.help = name, label, help_
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

    def gauge(self, names: str, help_: str, value: float) -> Iterator[Metric]:
        for name in names.split():
            family = GaugeMetricFamily(name, help_, labels=self._names)
            family.add_metric(self._values, value)
            yield family

    def gauges(
        self, name: str, help_: str, label: str, values: dict[str, float]
    ) -> Iterator[Metric]:
        family = GaugeMetricFamily(name, help_, labels=[*self._names, label])
        for key, value in values.items():
            family.add_metric([*self._values, key], value)
        yield family

    def info(self, name: str, help_: str, labels: dict[str, str]) -> Iterator[Metric]:
        """Yield a gauge of 1 whose labels are the message."""
        family = GaugeMetricFamily(name, help_, labels=[*self._names, *labels])
        family.add_metric([*self._values, *labels.values()], 1.0)
        yield family

    def counter(self, names: str, help_: str, value: float) -> Iterator[Metric]:
        """Yield counters; names are without `_total`, which the exposition adds."""
        for name in names.split():
            family = CounterMetricFamily(name, help_, labels=self._names)
            family.add_metric(self._values, value)
            yield family

    def instruments(self, owner: object) -> Iterator[Metric]:
        """Yield the families of all `Histogram` and `Labelled` among an object's attributes."""
        for one in vars(owner).values():
            if isinstance(one, Histogram):
                buckets = one.buckets()
                for name in one.names:
                    histogram = HistogramMetricFamily(name, one.help, labels=self._names)
                    histogram.add_metric(self._values, buckets, one.total)
                    yield histogram
            elif isinstance(one, Labelled):
                family = CounterMetricFamily(one.name, one.help, labels=[*self._names, one.label])
                for key, value in sorted(one.values.items()):
                    family.add_metric([*self._values, key], value)
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

"""Metrics of the gateway by replica; the series of a replica that left are dropped."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Sample
from prometheus_client.registry import Collector

from ..server.meter import SECONDS
from .replica import Replica

PAUSES = (0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
"""Bounds of the longest pauses, in seconds."""
COUNTS = {
    "requests": "Requests that a replica was given.",
    "lost": "Exchanges that ended with the connection to the replica.",
    "migrations": "Streams that went on at this replica.",
}
GAUGES = {
    "outstanding": "Requests that have not ended.",
    "ready": "1: the replica may be chosen.",
    "tells": "1: it tells what its cache holds.",
}
TIMES: dict[str, tuple[str, Sequence[float]]] = {
    "first_byte": ("Seconds from a request to the first byte of the replica's answer.", SECONDS),
    "first_part": ("Seconds from a request to the first part of the answer's body.", SECONDS),
    "answer": ("Seconds from a request to the end of the replica's answer.", SECONDS),
    "pause": ("Longest pause within an answer's body, in seconds.", PAUSES),
}
Buckets = list[tuple[float, float]]
"""(upper bound in seconds, exchanges up to it), ascending."""


class RouteMeter:
    """Counters and histograms of each replica in the gateway's registry."""

    def __init__(self, registry: CollectorRegistry, replicas: Sequence[Replica]) -> None:
        """Create the metrics; `replicas` is the gateway's list, which changes."""
        self._replicas = replicas
        self._counters = {
            name: Counter(f"headrace_route_{name}", text, ["replica"], registry=registry)
            for name, text in COUNTS.items()
        }
        self._answers = Counter(
            "headrace_route_answers",
            "Answers of a replica by the class of their status.",
            ["replica", "status"],
            registry=registry,
        )
        self._times = {
            name: Histogram(
                f"headrace_route_{name}_seconds",
                text,
                ["replica"],
                buckets=bounds,
                registry=registry,
            )
            for name, (text, bounds) in TIMES.items()
        }
        self._joined = Counter(
            "headrace_route_joined", "Replicas that were named since the start.", registry=registry
        )
        self._left = Counter(
            "headrace_route_left", "Replicas that left since the start.", registry=registry
        )
        self._children: dict[tuple[str, int], Any] = {}
        registry.register(self)

    def admit(self, replica: Replica) -> None:
        """Begin the series of a replica."""
        for name, metric in (self._counters | self._times).items():
            self._children[name, replica.number] = metric.labels(replica.url)
        self._joined.inc()

    def dismiss(self, replica: Replica) -> None:
        """Drop the series of a replica."""
        for name, metric in (self._counters | self._times).items():
            if self._children.pop((name, replica.number), None) is not None:
                metric.remove(replica.url)
        for status in range(1, 6):
            self._answers.remove(replica.url, f"{status}xx")
        self._left.inc()

    def count(self, what: str, replica: Replica) -> None:
        """Count a request, a lost exchange or a migration of a replica."""
        if (child := self._children.get((what, replica.number))) is not None:
            child.inc()

    def took(self, what: str, replica: Replica, seconds: float) -> None:
        """Record a time of one exchange; `what` is a key of `TIMES`."""
        if (child := self._children.get((what, replica.number))) is not None:
            child.observe(seconds)

    def answered(self, replica: Replica, status: int) -> None:
        """Count an answer by its status."""
        if ("requests", replica.number) in self._children:
            self._answers.labels(replica.url, f"{status // 100}xx").inc()

    def collect(self) -> list[GaugeMetricFamily]:
        """Return the gauges for prometheus_client."""
        found = {
            name: GaugeMetricFamily(f"headrace_route_{name}", text, labels=["replica"])
            for name, text in GAUGES.items()
        }
        for one in list(self._replicas):
            found["outstanding"].add_metric([one.url], one.outstanding)
            found["ready"].add_metric([one.url], float(one.may_be_chosen))
            found["tells"].add_metric([one.url], float(one.tells))
        return list(found.values())

    def counts(self) -> dict[str, dict[str, float]]:
        """Return the counters by replica: requests, lost, migrations, and classes of status."""
        found: dict[str, dict[str, float]] = defaultdict(dict)
        for name, metric in (*self._counters.items(), ("", self._answers)):
            for sample in samples(metric):
                if sample.name.endswith("_total"):
                    label = name or sample.labels["status"]
                    found[sample.labels["replica"]][label] = sample.value
        return found

    def times(self, what: str) -> dict[str, Buckets]:
        """Return the buckets of a histogram by replica."""
        found: dict[str, Buckets] = defaultdict(list)
        for sample in samples(self._times[what]):
            if "le" in sample.labels:
                bound = float(sample.labels["le"])
                found[sample.labels["replica"]].append((bound, sample.value))
        return found


def samples(metric: Collector) -> Iterator[Sample]:
    """Yield the samples of a metric."""
    for family in metric.collect():
        yield from family.samples


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return the upper bound of the bucket that holds a quantile; None without exchanges."""
    total = buckets[-1][1] if buckets else 0.0
    return (
        next((bound for bound, up_to in buckets if up_to >= share * total), None)
        if total
        else (None)
    )


def joined(all_of: Sequence[Buckets]) -> Buckets:
    """Sum the buckets of several replicas."""
    totals: dict[float, float] = defaultdict(float)
    for buckets in all_of:
        for bound, up_to in buckets:
            totals[bound] += up_to
    return sorted(totals.items())

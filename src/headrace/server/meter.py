"""What the HTTP side itself counts; everything about tokens is the engine's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from .accounts import Account

SECONDS = (
    0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 480.0,
)  # fmt: skip


class _Keys(Collector):
    """The ledger as counters; as many label values as there are keys in the file."""

    def __init__(self, accounts: Iterable[Account]) -> None:
        self._accounts = accounts

    def collect(self) -> Iterator[Metric]:
        for name, words in (
            ("requests", "Requests"), ("refused", "Requests refused by a limit"),
            ("prompt_tokens", "Prompt tokens"), ("cached_tokens", "Prompt tokens from the cache"),
            ("completion_tokens", "Generated tokens"),
        ):  # fmt: skip
            family = CounterMetricFamily(
                f"headrace_key_{name}", f"{words} by API key.", labels=["key"]
            )
            for account in self._accounts:
                family.add_metric([account.key.name], getattr(account.totals, name))
            yield family


class HttpMeter:
    """Counters of one server, in a registry of its own: two servers may live in one process."""

    def __init__(self, accounts: Iterable[Account] | None = None) -> None:
        self.registry = CollectorRegistry()
        if accounts is not None:
            self.registry.register(_Keys(accounts))
        self._exchanges = Counter(
            "headrace_http_requests",
            "HTTP exchanges by route and status; 499: the client left.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "headrace_http_request_seconds",
            "Seconds from the request's head to the end of its answer.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.in_work = Gauge(
            "headrace_http_requests_in_work",
            "Requests that hold, or wait for, the engine.",
            registry=self.registry,
        )
        self.draining = Gauge(
            "headrace_draining", "1 while the server finishes its work.", registry=self.registry
        )

    def exchange(self, route: str, method: str, status: int, seconds: float) -> None:
        known = method if method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS") else "other"
        self._exchanges.labels(route, known, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

"""Metrics of the HTTP side; everything about tokens is the engine's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from ..base.errors import HeadraceError
from ..base.ignored import all_ignored
from ..obs.threads import THREADS

if TYPE_CHECKING:
    from .accounts import Account
    from .served_profile import ServedProfile

# Otherwise each series has a second one, `_created`, of no use here.
disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 480.0)

LAGS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)

FAILURES = (
    "store_write", "store_read", "ledger_write", "keys_read", "certificate_read", "file_write",
    "file_read", "batch_write", "batch_failed", "reader_stalled", "habit", "bug",
)  # fmt: skip
"""Kinds of failures outside the engine (docs/reliability.md describes their effects)."""


class _KeptByOthers(Collector):
    """A counter that another part of this process keeps."""

    def __init__(
        self, name: str, help_: str, label: str | None, values: Callable[[], Mapping[str, float]]
    ) -> None:
        """Export `values`, keyed by the values of `label`; None: a single value."""
        self._name, self._help, self._values = name, help_, values
        self._labels = [] if label is None else [label]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for key, value in sorted(self._values().items()):
            family.add_metric([key] * len(self._labels), value)
        yield family


def _lost_lines() -> dict[str, float]:
    """Count the log lines that this process's handlers could not write (`obs.logs`)."""
    return {"": sum(getattr(one, "lost", 0) for one in logging.getLogger().handlers)}


TOLD = (
    _KeptByOthers(
        "headrace_log_lines_lost", "Log lines that could not be written.", None, _lost_lines
    ),
    _KeptByOthers(
        "headrace_thread_failures",
        "Errors in threads of the API process, by thread; the engine's: headrace:failures.",
        "thread",
        lambda: THREADS.failures,
    ),
    _KeptByOthers(
        "headrace_ignored_fields",
        "Keys of messages and tools, and keywords of schemas, that were left out.",
        "where",
        all_ignored,
    ),
)
OF_KEYS = {
    "requests": "Requests",
    "refused": "Requests refused by a limit",
    "prompt_tokens": "Prompt tokens",
    "cached_tokens": "Prompt tokens from the cache",
    "completion_tokens": "Generated tokens",
}
"""Totals of the ledger, with one label value per key in the file."""


class HttpMeter:
    """Metrics of one server, in a registry of its own: two servers may live in one process."""

    def __init__(self, accounts: Iterable[Account] | None = None) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        for name, words in OF_KEYS.items() if accounts is not None else ():

            def totals(name: str = name) -> dict[str, float]:
                return {one.key.name: getattr(one.totals, name) for one in accounts or ()}

            metric = _KeptByOthers(f"headrace_key_{name}", f"{words} by API key.", "key", totals)
            self.registry.register(metric)
        self._exchanges = counter(
            "headrace_http_requests",
            "HTTP exchanges by route and status; 499: the client left.",
            ["route", "method", "status"],
        )
        self._seconds = histogram(
            "headrace_http_request_seconds",
            "Seconds from the request's head to the end of its answer.",
            ["route"],
            buckets=SECONDS,
        )
        self._failures = counter(
            "headrace_server_failures",
            "Failures of the HTTP side, by kind; those of the engine are headrace:failures.",
            ["kind"],
        )
        for kind in FAILURES:
            self._failures.labels(kind)
        self._refused = counter(
            "headrace_refused",
            "Requests refused before they reached the engine, by the code that the client got.",
            ["code"],
        )
        self._restarts = counter(
            "headrace_api_restarts",
            "API processes that died, and that the parent followed by another.",
        )
        for one in TOLD:
            self.registry.register(one)
        self._batches = counter("headrace_batches", "Batches that ended, by how.", ["status"])
        self._batch_requests = counter(
            "headrace_batch_requests", "Requests of batches, by how they ended.", ["outcome"]
        )
        self.in_work = gauge(
            "headrace_http_requests_in_work", "Requests that hold, or wait for, the engine."
        )
        self._lag = histogram(
            "headrace_event_loop_lag_seconds",
            "How late the event loop was, looked at twenty times a second.",
            buckets=LAGS,
        )
        self.longest_hold = gauge(
            "headrace_event_loop_longest_hold_seconds",
            "The longest time since the start that one thing held the event loop.",
        )
        self.draining = gauge("headrace_draining", "1 while the server finishes its work.")

    def certified(self, served: ServedProfile) -> None:
        """Export the served signed profile, and its share of the certified speed."""
        labels = {"profile": served.name, "digest": served.digest}
        Gauge(
            "headrace_profile_info",
            "1, with name and digest of the signed profile that is served.",
            list(labels),
            registry=self.registry,
        ).labels(**labels).set(1)
        if served.share is not None:
            Gauge(
                "headrace_certified_share",
                "Certified seconds a token divided by those measured at the start.",
                registry=self.registry,
            ).set(served.share)

    def exchange(self, route: str, method: str, status: int, seconds: float) -> None:
        known = method if method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS") else "other"
        self._exchanges.labels(route, known, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def restarted(self, count: int) -> None:
        """Count the API processes that died before this one, under the same parent."""
        self._restarts.inc(count)

    def late(self, seconds: float) -> None:
        """Record the lateness of one beat of the event loop (`obs.loopwatch`)."""
        self._lag.observe(seconds)

    def failed(self, kind: str) -> None:
        """Count a failure; `kind` is one of `FAILURES`."""
        assert kind in FAILURES, f"{kind} is no kind of failure"
        self._failures.labels(kind).inc()

    def batch_ended(self, status: str) -> None:
        self._batches.labels(status).inc()

    def batch_request(self, outcome: str) -> None:
        """Count a batch's request; `outcome` is completed or failed."""
        self._batch_requests.labels(outcome).inc()

    def refused(self, error: HeadraceError) -> None:
        """Count a request that got this error and no work. The codes are names in the source."""
        self._refused.labels(error.code or error.type).inc()

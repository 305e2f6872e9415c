"""The metrics: one function each, with its formula and unit. Times in seconds, on one clock.

`planned` is a request's due time, `sent` its send time, `end` the end of its answer. `chunk_i` is
the arrival of the answer's i-th piece, `tokens` the server's count of output tokens. Only
successful requests count, except in the failure metrics; cancelled ones count only in `cancelled`.
Limits (SLO) are on percentiles of a run, or on each request.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..base.config import parse_seconds
from ..base.errors import InvalidRequest
from .record import RequestRecord

_PART = re.compile(r"(ttft|itl|tpot|e2e)(?::p(\d{1,2}(?:\.\d+)?))?<(\d+(?:\.\d+)?[a-zµ]+)")


@dataclass(frozen=True, slots=True)
class Limit:
    metric: str
    percentile: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that must all hold."""

    text: str
    limits: tuple[Limit, ...]

    def met_by(self, record: RequestRecord) -> bool:
        """Return whether one request meets every limit (itl: its mean gap)."""
        return all(
            (value := request_value(limit.metric, record)) is None or value <= limit.seconds
            for limit in self.limits
        )

    def check(self, records: Sequence[RequestRecord]) -> list[tuple[Limit, float | None, bool]]:
        """Return (limit, value of its percentile, whether it is met) over a run; failed requests
        break every limit."""
        failed = sum(record.error is not None for record in records)
        result: list[tuple[Limit, float | None, bool]] = []
        for limit in self.limits:
            values = [
                value
                for record in records
                if record.ok
                for value in request_values(limit.metric, record)
            ]
            if not values:
                result.append((limit, None, False))
                continue
            per_failure = max(1, len(values) // max(1, len(records) - failed))
            values += [float("inf")] * (failed * per_failure)
            # As in the table; next to a failure, which has no value, take the neighbour.
            method: Literal["linear", "higher"] = "higher" if failed else "linear"
            value = float(np.percentile(values, limit.percentile, method=method))
            result.append((limit, value, value <= limit.seconds))
        return result

    def met(self, records: Sequence[RequestRecord]) -> bool:
        return bool(records) and all(kept for _, _, kept in self.check(records))


def request_values(metric: str, record: RequestRecord) -> list[float]:
    """Return a request's values of a metric that can have a limit."""
    return {"ttft": ttft, "itl": itl, "tpot": tpot, "e2e": e2e}[metric].values(record)


def request_value(metric: str, record: RequestRecord) -> float | None:
    """Return the one value of a request (itl: its mean pause), or None."""
    values = request_values(metric, record)
    return sum(values) / len(values) if values else None


def parse_slo(text: str) -> Slo:
    """Parse `ttft:p99<500ms,tpot:p95<50ms`; the default percentile is p99."""
    limits = []
    for part in text.replace(" ", "").split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidRequest(
                "an SLO is METRIC[:pNN]<LIMIT with metric ttft, itl, tpot or e2e and a limit such "
                f"as 80ms or 1.5s, joined by commas; not {part!r}",
                param="slo",
            )
        metric, percentile, limit = match.groups()
        seconds = parse_seconds(limit, "slo")
        if seconds <= 0:
            raise InvalidRequest(f"{part!r} can never be met", param="slo")
        limits.append(Limit(metric, float(percentile or 99), seconds))
    return Slo(text, tuple(limits))


@dataclass(frozen=True, slots=True)
class Run:
    """Input of the metrics: the records, the clock's start and end."""

    records: Sequence[RequestRecord]
    start_ns: int
    end_ns: int
    slo: Slo | None = None
    shareable_tokens: int | None = None
    devices: int = 1
    price_per_hour: float | None = None
    """Price of one device."""
    joules: float | None = None
    queue_seconds: float | None = None
    """Mean wait in the server's queue, from its own histogram."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def good(self) -> list[RequestRecord]:
        return [record for record in self.records if record.ok]


Values = Callable[[RequestRecord], list[float]]
Value = Callable[[Run], float | None]


@dataclass(frozen=True, slots=True)
class Sample:
    """A metric with a value per request (or per token): reported as a distribution."""

    name: str
    unit: str
    lower_is_better: bool
    values: Values


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric with one value per run, or None if unknown."""

    name: str
    unit: str
    lower_is_better: bool
    value: Value


SAMPLES: list[Sample] = []
FIGURES: list[Figure] = []


def _sample(unit: str, *, lower: bool) -> Callable[[Values], Sample]:
    def add(values: Values) -> Sample:
        SAMPLES.append(Sample(values.__name__, unit, lower, values))
        return SAMPLES[-1]

    return add


def _figure(unit: str, *, lower: bool) -> Callable[[Value], Figure]:
    def add(value: Value) -> Figure:
        FIGURES.append(Figure(value.__name__, unit, lower, value))
        return FIGURES[-1]

    return add


@_sample("s", lower=True)
def ttft(record: RequestRecord) -> list[float]:
    """chunk_1 - planned; empty if the answer came in one piece."""
    return [(record.chunk_ns[0] - record.planned_ns) / 1e9] if record.chunk_ns else []


@_sample("s", lower=True)
def ttft_from_send(record: RequestRecord) -> list[float]:
    """chunk_1 - sent: the figure of a client that ignores its own delay."""
    return [(record.chunk_ns[0] - record.sent_ns) / 1e9] if record.chunk_ns else []


@_sample("s", lower=True)
def itl(record: RequestRecord) -> list[float]:
    """chunk_i - chunk_(i-1) for every piece after the first: the pauses that a reader sees."""
    times = record.chunk_ns
    return [(later - earlier) / 1e9 for earlier, later in itertools.pairwise(times)]


@_sample("s", lower=True)
def tpot(record: RequestRecord) -> list[float]:
    """(chunk_last - chunk_1) / (tokens · (pieces - 1) / pieces).

    The tokens of the first piece exist when the clock starts. With one token per piece the divisor
    is the usual tokens - 1; with several, tokens - 1 would be too large.
    """
    times, pieces = record.chunk_ns, len(record.chunk_ns)
    if pieces < 2 or record.tokens < 2:
        return []
    return [(times[-1] - times[0]) / 1e9 / (record.tokens * (pieces - 1) / pieces)]


@_sample("s", lower=True)
def e2e(record: RequestRecord) -> list[float]:
    """end - planned."""
    return [(record.end_ns - record.planned_ns) / 1e9]


@_sample("s", lower=True)
def send_delay(record: RequestRecord) -> list[float]:
    """sent - planned: the client's own lateness, part of every latency above."""
    return [(record.sent_ns - record.planned_ns) / 1e9]


@_sample("tok/s", lower=False)
def user_throughput(record: RequestRecord) -> list[float]:
    """tokens / (end - planned): the rate of one user."""
    if not record.asked_tokens:
        return []  # An embedding.
    return [record.tokens / ((record.end_ns - record.planned_ns) / 1e9)]


@_sample("tok", lower=True)
def input_tokens(record: RequestRecord) -> list[float]:
    """Prompt tokens as the server counts them."""
    known = record.prompt_tokens or record.known_prompt_tokens
    return [float(known)] if known else []


@_sample("tok", lower=True)
def output_tokens(record: RequestRecord) -> list[float]:
    """Output tokens as the server counts them, otherwise pieces."""
    return [float(record.tokens)] if record.asked_tokens else []


@_sample("tok", lower=True)
def picture_tokens(record: RequestRecord) -> list[float]:
    """Prompt tokens that stand for pictures, as the server counts them."""
    return [float(record.picture_tokens)] if record.picture_tokens else []


@_figure("share", lower=False)
def right_answers(run: Run) -> float | None:
    """Right answers / answers to questions with a known answer."""
    judged = [record.right for record in run.good if record.right is not None]
    return sum(judged) / len(judged) if judged else None


@_figure("tok/s", lower=False)
def output_throughput(run: Run) -> float | None:
    """Σ tokens of good requests / (last end - start)."""
    return sum(record.tokens for record in run.good) / run.seconds


@_figure("tok/s", lower=False)
def total_throughput(run: Run) -> float | None:
    """Σ (prompt tokens + tokens) of good requests / (last end - start)."""
    total = sum(
        (record.prompt_tokens or record.known_prompt_tokens) + record.tokens for record in run.good
    )
    return total / run.seconds


@_figure("tok/s", lower=False)
def output_throughput_per_device(run: Run) -> float | None:
    """Output throughput / devices."""
    return sum(record.tokens for record in run.good) / run.seconds / run.devices


@_figure("req/s", lower=False)
def request_throughput(run: Run) -> float | None:
    """Good requests / (last end - start)."""
    return len(run.good) / run.seconds


@_figure("req/s", lower=False)
def goodput(run: Run) -> float | None:
    """Good requests that met every limit of the SLO / (last end - start)."""
    if run.slo is None:
        return None
    return sum(run.slo.met_by(record) for record in run.good) / run.seconds


@_figure("req", lower=False)
def concurrency(run: Run) -> float | None:
    """Σ (end - sent) of all requests / (last end - start): mean requests in the server."""
    busy = sum(record.end_ns - record.sent_ns for record in run.records)
    return busy / 1e9 / run.seconds


@_figure("s", lower=True)
def queue_time(run: Run) -> float | None:
    """Mean of the server's own queue-time histogram over the run; absent if it has none.

    A client cannot see where its request waits in the server, so this is the server's own figure.
    """
    return run.queue_seconds


@_figure("share", lower=True)
def failure_rate(run: Run) -> float | None:
    """Requests that ended with an error / requests."""
    if not run.records:
        return None
    return sum(record.error is not None for record in run.records) / len(run.records)


@_figure("req", lower=True)
def cancelled(run: Run) -> float | None:
    """Requests that the workload cancelled on purpose."""
    return float(sum(record.cancelled for record in run.records))


@_figure("share", lower=False)
def prefix_hit_rate(run: Run) -> float | None:
    """Σ cached prompt tokens / Σ prompt tokens, as reported in the server's usage."""
    counted = [r for r in run.good if r.cached_tokens is not None and r.prompt_tokens]
    total = sum(record.prompt_tokens or 0 for record in counted)
    return sum(record.cached_tokens or 0 for record in counted) / total if total else None


@_figure("share", lower=False)
def possible_hit_rate(run: Run) -> float | None:
    """Prompt tokens shared with an earlier request / prompt tokens: the most possible hits."""
    total = sum(r.prompt_tokens or r.known_prompt_tokens for r in run.good)
    if not run.shareable_tokens or not total:
        return None
    return run.shareable_tokens / total


@_figure("tok", lower=True)
def tokens_per_chunk(run: Run) -> float | None:
    """Σ tokens / Σ pieces; above 1 the server sends several tokens in one piece."""
    chunks = sum(len(record.chunk_ns) for record in run.good)
    return sum(record.tokens for record in run.good) / chunks if chunks else None


@_figure("J/tok", lower=True)
def joules_per_token(run: Run) -> float | None:
    """Joules read from counters during the run / Σ tokens; absent without a readable counter."""
    tokens = sum(record.tokens for record in run.good)
    return run.joules / tokens if run.joules is not None and tokens else None


@_figure("price/Mtok", lower=True)
def cost_per_million_tokens(run: Run) -> float | None:
    """devices · price per hour / (output throughput · 3600) · 10⁶."""
    tokens = sum(record.tokens for record in run.good)
    if run.price_per_hour is None or not tokens:
        return None
    return run.devices * run.price_per_hour * run.seconds / 3600 / tokens * 1e6


def sample(metric: Sample, records: Sequence[RequestRecord]) -> list[float]:
    """Return all values of a metric over the good requests."""
    return [value for record in records if record.ok for value in metric.values(record)]

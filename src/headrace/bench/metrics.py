"""The metrics: one class each, with its formula and unit. Times in seconds, on one clock.

`planned` is when a request was due, `sent` when it was sent, `chunk_i` when the i-th piece of the
answer arrived, `end` when the answer ended, `tokens` the server's count of output tokens.
Only requests that ended well count, but for the failure metrics; cancelled ones count nowhere
but in `Cancelled`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .record import RequestRecord
from .slo import Slo, request_value


@dataclass(frozen=True, slots=True)
class Run:
    """What metrics are computed of: the records, the clock's start and end."""

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
    """Mean wait in the server's queue, as its own histogram tells."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def good(self) -> list[RequestRecord]:
        return [record for record in self.records if record.ok]


class Sample:
    """A metric with a value per request (or per token): reported as a distribution."""

    name: ClassVar[str]
    unit: ClassVar[str] = "s"
    lower_is_better: ClassVar[bool] = True

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        raise NotImplementedError


class TimeToFirstToken(Sample):
    """chunk_1 - planned; none where the answer came whole."""

    name = "ttft"

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        return [(record.chunk_ns[0] - record.planned_ns) / 1e9] if record.chunk_ns else []


class ServiceTimeToFirstToken(Sample):
    """chunk_1 - sent: what a client that forgets its own delay would report."""

    name = "ttft_from_send"

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        return [(record.chunk_ns[0] - record.sent_ns) / 1e9] if record.chunk_ns else []


class InterTokenLatency(Sample):
    """chunk_i - chunk_(i-1) for every piece after the first: the pauses that a reader sees."""

    name = "itl"

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        times = record.chunk_ns
        return [(later - earlier) / 1e9 for earlier, later in itertools.pairwise(times)]


class TimePerOutputToken(Sample):
    """(chunk_last - chunk_1) / (tokens · (pieces - 1) / pieces).

    The tokens of the first piece were there when the clock began. With one token a piece that is
    the usual tokens - 1; with several, dividing by tokens - 1 would make it too small.
    """

    name = "tpot"

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        value = request_value("tpot", record)
        return [] if value is None else [value]


class EndToEnd(Sample):
    """end - planned."""

    name = "e2e"

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        return [(record.end_ns - record.planned_ns) / 1e9]


class SendDelay(Sample):
    """sent - planned: the client's own lateness, part of every latency above."""

    name = "send_delay"

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        return [(record.sent_ns - record.planned_ns) / 1e9]


class UserThroughput(Sample):
    """tokens / (end - planned): what one user gets."""

    name = "user_throughput"
    unit = "tok/s"
    lower_is_better = False

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        if not record.asked_tokens:
            return []  # An embedding.
        return [record.tokens / ((record.end_ns - record.planned_ns) / 1e9)]


class InputTokens(Sample):
    """Prompt tokens as the server counts them."""

    name = "input_tokens"
    unit = "tok"

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        known = record.prompt_tokens or record.known_prompt_tokens
        return [float(known)] if known else []


class OutputTokens(Sample):
    """Output tokens as the server counts them, else the pieces."""

    name = "output_tokens"
    unit = "tok"

    @staticmethod
    def values(record: RequestRecord) -> list[float]:
        return [float(record.tokens)] if record.asked_tokens else []


SAMPLES: tuple[type[Sample], ...] = (
    TimeToFirstToken,
    ServiceTimeToFirstToken,
    InterTokenLatency,
    TimePerOutputToken,
    EndToEnd,
    SendDelay,
    UserThroughput,
    InputTokens,
    OutputTokens,
)


class Figure:
    """A metric with one value per run; None where it cannot be known."""

    name: ClassVar[str]
    unit: ClassVar[str]
    lower_is_better: ClassVar[bool] = False

    @staticmethod
    def value(run: Run) -> float | None:
        raise NotImplementedError


class OutputThroughput(Figure):
    """Σ tokens of good requests / (last end - start)."""

    name = "output_throughput"
    unit = "tok/s"

    @staticmethod
    def value(run: Run) -> float | None:
        return sum(record.tokens for record in run.good) / run.seconds


class TotalThroughput(Figure):
    """Σ (prompt tokens + tokens) of good requests / (last end - start)."""

    name = "total_throughput"
    unit = "tok/s"

    @staticmethod
    def value(run: Run) -> float | None:
        total = sum(
            (record.prompt_tokens or record.known_prompt_tokens) + record.tokens
            for record in run.good
        )
        return total / run.seconds


class DeviceThroughput(Figure):
    """Output throughput / devices."""

    name = "output_throughput_per_device"
    unit = "tok/s"

    @staticmethod
    def value(run: Run) -> float | None:
        return sum(record.tokens for record in run.good) / run.seconds / run.devices


class RequestThroughput(Figure):
    """Good requests / (last end - start)."""

    name = "request_throughput"
    unit = "req/s"

    @staticmethod
    def value(run: Run) -> float | None:
        return len(run.good) / run.seconds


class Goodput(Figure):
    """Good requests that met every limit of the SLO / (last end - start)."""

    name = "goodput"
    unit = "req/s"

    @staticmethod
    def value(run: Run) -> float | None:
        if run.slo is None:
            return None
        return sum(run.slo.met_by(record) for record in run.good) / run.seconds


class Concurrency(Figure):
    """Σ (end - sent) of all requests / (last end - start): mean requests in the server."""

    name = "concurrency"
    unit = "req"

    @staticmethod
    def value(run: Run) -> float | None:
        busy = sum(record.end_ns - record.sent_ns for record in run.records)
        return busy / 1e9 / run.seconds


class QueueTime(Figure):
    """Mean of the server's own queue-time histogram over the run; absent where it has none.

    A client cannot see where in the server its request waits: this is the server's word.
    """

    name = "queue_time"
    unit = "s"
    lower_is_better = True

    @staticmethod
    def value(run: Run) -> float | None:
        return run.queue_seconds


class Failures(Figure):
    """Requests that ended with an error / requests."""

    name = "failure_rate"
    unit = "share"
    lower_is_better = True

    @staticmethod
    def value(run: Run) -> float | None:
        if not run.records:
            return None
        return sum(record.error is not None for record in run.records) / len(run.records)


class Cancelled(Figure):
    """Requests that the workload hung up on purpose."""

    name = "cancelled"
    unit = "req"
    lower_is_better = True

    @staticmethod
    def value(run: Run) -> float | None:
        return float(sum(record.cancelled for record in run.records))


class PrefixHitRate(Figure):
    """Σ cached prompt tokens / Σ prompt tokens, as the server's usage tells."""

    name = "prefix_hit_rate"
    unit = "share"

    @staticmethod
    def value(run: Run) -> float | None:
        told = [r for r in run.good if r.cached_tokens is not None and r.prompt_tokens]
        total = sum(record.prompt_tokens or 0 for record in told)
        return sum(record.cached_tokens or 0 for record in told) / total if total else None


class PossibleHitRate(Figure):
    """Prompt tokens that an earlier request had too / prompt tokens: the most a cache can hit."""

    name = "possible_hit_rate"
    unit = "share"

    @staticmethod
    def value(run: Run) -> float | None:
        total = sum(r.prompt_tokens or r.known_prompt_tokens for r in run.good)
        if not run.shareable_tokens or not total:
            return None
        return run.shareable_tokens / total


class TokensPerChunk(Figure):
    """Σ tokens / Σ pieces: above 1 the server sends several tokens in one piece."""

    name = "tokens_per_chunk"
    unit = "tok"
    lower_is_better = True

    @staticmethod
    def value(run: Run) -> float | None:
        chunks = sum(len(record.chunk_ns) for record in run.good)
        return sum(record.tokens for record in run.good) / chunks if chunks else None


class EnergyPerToken(Figure):
    """Joules read from counters during the run / Σ tokens; absent where nothing can be read."""

    name = "joules_per_token"
    unit = "J/tok"
    lower_is_better = True

    @staticmethod
    def value(run: Run) -> float | None:
        tokens = sum(record.tokens for record in run.good)
        return run.joules / tokens if run.joules is not None and tokens else None


class CostPerMillion(Figure):
    """devices · price per hour / (output throughput · 3600) · 10⁶."""

    name = "cost_per_million_tokens"
    unit = "price/Mtok"
    lower_is_better = True

    @staticmethod
    def value(run: Run) -> float | None:
        tokens = sum(record.tokens for record in run.good)
        if run.price_per_hour is None or not tokens:
            return None
        return run.devices * run.price_per_hour * run.seconds / 3600 / tokens * 1e6


FIGURES: tuple[type[Figure], ...] = (
    OutputThroughput,
    TotalThroughput,
    DeviceThroughput,
    RequestThroughput,
    Goodput,
    Concurrency,
    QueueTime,
    Failures,
    Cancelled,
    PrefixHitRate,
    PossibleHitRate,
    TokensPerChunk,
    EnergyPerToken,
    CostPerMillion,
)


def sample(metric: type[Sample], records: Sequence[RequestRecord]) -> list[float]:
    """All values of a metric over the good requests."""
    return [value for record in records if record.ok for value in metric.values(record)]

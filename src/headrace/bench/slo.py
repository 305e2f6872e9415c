"""Service-level objectives: limits on percentiles of a run, or on each request."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..base.errors import InvalidRequest
from .record import RequestRecord

_PART = re.compile(r"(ttft|itl|tpot|e2e)(?::p(\d{1,2}(?:\.\d+)?))?<(\d+(?:\.\d+)?)(ms|s)")


@dataclass(frozen=True, slots=True)
class Limit:
    metric: str
    percentile: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Slo:
    """All limits must hold."""

    text: str
    limits: tuple[Limit, ...]

    def met_by(self, record: RequestRecord) -> bool:
        """Does one request keep every limit (itl: its mean gap)?"""
        return all(
            (value := request_value(limit.metric, record)) is None or value <= limit.seconds
            for limit in self.limits
        )

    def check(self, records: Sequence[RequestRecord]) -> list[tuple[Limit, float | None, bool]]:
        """(limit, value of its percentile, kept?) over a run; failed requests break every limit."""
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
            # As in the table; beside a failure, which is no number, its neighbour.
            method: Literal["linear", "higher"] = "higher" if failed else "linear"
            value = float(np.percentile(values, limit.percentile, method=method))
            result.append((limit, value, value <= limit.seconds))
        return result

    def met(self, records: Sequence[RequestRecord]) -> bool:
        return bool(records) and all(kept for _, _, kept in self.check(records))


def request_values(metric: str, record: RequestRecord) -> list[float]:
    times = record.chunk_ns
    if metric == "itl":
        return [(b - a) / 1e9 for a, b in itertools.pairwise(times)]
    value = request_value(metric, record)
    return [] if value is None else [value]


def request_value(metric: str, record: RequestRecord) -> float | None:
    times = record.chunk_ns
    if metric == "ttft":
        return (times[0] - record.planned_ns) / 1e9 if times else None
    if metric == "e2e":
        return (record.end_ns - record.planned_ns) / 1e9
    if len(times) < 2:
        return None
    pieces = len(times)
    if metric == "itl":
        return (times[-1] - times[0]) / 1e9 / (pieces - 1)
    if record.tokens < 2:
        return None
    return (times[-1] - times[0]) / 1e9 / (record.tokens * (pieces - 1) / pieces)


def parse_slo(text: str) -> Slo:
    """`ttft:p99<500ms,tpot:p95<50ms`; without a percentile p99."""
    limits = []
    for part in text.replace(" ", "").split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise InvalidRequest(
                "an SLO is METRIC[:pNN]<LIMIT with metric ttft, itl, tpot or e2e and a limit in "
                f"ms or s, joined by commas; not {part!r}",
                param="slo",
            )
        metric, percentile, number, unit = match.groups()
        seconds = float(number) / (1000 if unit == "ms" else 1)
        if seconds <= 0:
            raise InvalidRequest(f"{part!r} can never be met", param="slo")
        limits.append(Limit(metric, float(percentile or 99), seconds))
    return Slo(text, tuple(limits))

"""A against B: repeated runs, interleaved, and confidence intervals of the ratios.

A slow period of a shared machine affects both sides of a pair. So ratios of pairs vary less than
either side. A metric has regressed if its whole interval is beyond the tolerance on the wrong side.
An interval that contains the tolerance is unclear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.errors import InvalidRequest
from .metrics import SAMPLES, sample
from .options import RunOptions
from .result import read_result
from .statistics import ratio_bootstrap, ratio_interval
from .store import read_records

REGRESSED = 3
"""Exit code of a comparison that found a regression."""
MISSED = 3
"""Exit code if an SLO is missed."""
INVALID_RUN = 4
"""Exit code of a run that says nothing about the server."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric, B over A."""

    name: str
    lower_is_better: bool
    ratio: float
    low: float
    high: float
    tolerance: float

    @property
    def verdict(self) -> str:
        """better, worse, same (within the tolerance) or unclear."""
        low, high = self.low, self.high
        if not self.lower_is_better:
            low, high = 1 / self.high if self.high else 0.0, 1 / self.low if self.low else 1e9
        worse, better = 1 + self.tolerance, 1 / (1 + self.tolerance)
        if low > worse:
            return "worse"
        if high < better:
            return "better"
        return "same" if better <= low and high <= worse else "unclear"


METRICS: tuple[tuple[str, str, str | None, bool], ...] = (
    ("output throughput", "output_throughput", None, False),
    ("TTFT p50", "ttft", "p50", True),
    ("TTFT p99", "ttft", "p99", True),
    ("TPOT p50", "tpot", "p50", True),
    ("ITL p50", "itl", "p50", True),
    ("ITL p99", "itl", "p99", True),
    ("end to end p50", "e2e", "p50", True),
    ("goodput", "goodput", None, False),
)
"""(name, figure or sample, percentile, lower is better)."""


FAILED = "failed requests"
"""Row next to `METRICS`; its ratio is of (failed + 1/2) / (requests + 1), never 0 / 0."""
SAME = tuple(
    """
    endpoint workload trace trace_speed input output picture requests duration arrivals concurrency
    prefix_tokens groups zipf turns think_seconds ignore_eos stream temperature extra
    """.split()  # noqa: SIM905
)
"""Options that two runs must share for a meaningful ratio."""


def check_alike(results: Sequence[dict[str, Any]]) -> None:
    """Raise `InvalidRequest` if two results have different loads, or one is invalid."""
    for result in results:
        if not result["valid"]:
            why = next(f["text"] for f in result["findings"] if f["severity"] == "invalid")
            raise InvalidRequest(f"no comparison: a run is invalid: {why}", param="result")
    first, second = (result["options"] for result in results)
    unlike = [
        f"{name} ({first.get(name)!r}, {second.get(name)!r})"
        for name in SAME
        if first.get(name) != second.get(name)
    ]
    kinds = [result.get("kind") or "over HTTP" for result in results]
    if kinds[0] != kinds[1]:
        unlike.append(f"kind ({kinds[0]}, {kinds[1]})")
    if unlike:
        raise InvalidRequest(
            f"no comparison: the runs differ in {', '.join(unlike)}", param="result"
        )


def compare_failures(counts: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> Compared | None:
    """Compare (failed, requests) of both sides of each pair, pooled; None if nothing failed.

    A 95 % interval of the ratio of two shares on a log scale, with half a failure added to each
    (Katz et al. 1978): any significant growth is a regression, regardless of the tolerance.
    """
    (a, n), (b, m) = (
        tuple(map(sum, zip(*side, strict=True))) for side in zip(*counts, strict=True)
    )
    if not a and not b:
        return None
    p, q = (a + 0.5) / (n + 1), (b + 0.5) / (m + 1)
    wide = 1.96 * math.sqrt(1 / (a + 0.5) - 1 / (n + 1) + 1 / (b + 0.5) - 1 / (m + 1))
    ratio = q / p
    return Compared(FAILED, True, ratio, ratio * math.exp(-wide), ratio * math.exp(wide), 0.0)


def failures_of(result: dict[str, Any]) -> tuple[int, int]:
    rate = result["figures"].get("failure_rate")
    requests = int(result["requests"])
    return (0 if rate is None else round(rate["value"] * requests)), requests


def value_of(result: dict[str, Any], name: str, percentile: str | None) -> float | None:
    if percentile is None:
        found = result["figures"].get(name)
        return None if found is None else float(found["value"])
    found = result["samples"].get(name)
    return None if found is None else float(found["percentiles"][percentile])


def compare_pairs(
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], tolerance: float
) -> list[Compared]:
    """Compare paired repeats: Student's t on the logarithms of the ratios."""
    compared = []
    for title, name, percentile, lower in METRICS:
        values = [(value_of(a, name, percentile), value_of(b, name, percentile)) for a, b in pairs]
        usable = [(a, b) for a, b in values if a and b]
        if usable:
            compared.append(Compared(title, lower, *ratio_interval(usable), tolerance))
    failed = compare_failures([(failures_of(a), failures_of(b)) for a, b in pairs])
    return compared if failed is None else [*compared, failed]


def compare_single(first: Path, second: Path, tolerance: float) -> list[Compared]:
    """Compare one run of each by bootstrap over the requests; this cannot see drift between runs.

    Raises `InvalidRequest` if the runs cannot be compared (`check_alike`).
    """
    results = [read_result(first), read_result(second)]
    check_alike(results)
    records = [_records(first), _records(second)]
    by_name = {metric.name: metric for metric in SAMPLES}
    compared = []
    for title, name, percentile, lower in METRICS:
        if percentile is None:
            a, b = (value_of(result, name, None) for result in results)
            if a and b:
                compared.append(Compared(title, lower, b / a, 0.0, float("inf"), tolerance))
            continue
        values = [sample(by_name[name], side) for side in records]
        if all(values):
            interval = ratio_bootstrap(values[0], values[1], float(percentile[1:]))
            compared.append(Compared(title, lower, *interval, tolerance))
    failed = compare_failures([(failures_of(results[0]), failures_of(results[1]))])
    return compared if failed is None else [*compared, failed]


def interleave(
    a: RunOptions,
    b: RunOptions,
    repeats: int,
    folder: Path | None,
    run: Callable[[RunOptions, Path | None], dict[str, Any]],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Run `repeats` pairs in the order A B, B A, A B …; each with its own seed."""
    if repeats < 2:
        raise InvalidRequest("a comparison needs at least 2 repeats", param="repeats")
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for number in range(repeats):
        sides = [("a", a), ("b", b)]
        if number % 2:
            sides.reverse()
        found = {}
        for name, options in sides:
            place = None if folder is None else folder / f"{number}-{name}"
            # On one server, this side must not find the other side's prompts in the cache.
            shift = 1_000_003 if name == "b" and a.url == b.url else 0
            found[name] = run(replace(options, seed=options.seed + number + shift), place)
            if found[name]["interrupted"]:
                return pairs
        pairs.append((found["a"], found["b"]))
    return pairs


def rows(compared: Sequence[Compared]) -> list[list[str]]:
    return [[c.name, f"{c.ratio:.3f}", _bound(c.low), _bound(c.high), c.verdict] for c in compared]


def regressed(compared: Sequence[Compared]) -> bool:
    return any(c.verdict == "worse" for c in compared)


def _bound(value: float) -> str:
    return "–" if value in (0.0, float("inf")) else f"{value:.3f}"


def _records(path: Path) -> list[Any]:
    folder = path if path.is_dir() else path.parent
    file = folder / "requests.jsonl"
    if not file.is_file():
        raise InvalidRequest(f"no {file}: comparing two runs needs their requests", param="result")
    return read_records(file)

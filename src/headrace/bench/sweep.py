"""Several runs in a row: sweeps over concurrency or rate, and the search for the most under an SLO.

Every point has its own folder and is saved when it is done; an interrupted sweep resumes at the
first missing point.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..base.errors import InvalidRequest
from ..roofline.page import charts, notice, page, table
from ..roofline.plot import Chart, Series
from .checking import AccuracyGate, lowest, said
from .metrics import parse_slo
from .options import RunOptions
from .report import number
from .result import read_result
from .run import run_bench
from .store import write_text

OnPoint = Callable[["Point"], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a sweep."""

    by: str
    """concurrency or rate."""
    value: float
    result: dict[str, Any]

    def figure(self, name: str) -> float:
        found = self.result["figures"].get(name)
        return float(found["value"]) if found else float("nan")

    def percentile(self, sample: str, percentile: str) -> float:
        found = self.result["samples"].get(sample)
        return float(found["percentiles"][percentile]) if found else float("nan")

    @property
    def interactivity(self) -> float:
        """Tokens a second that a reader sees after the first token: 1 / median TPOT."""
        tpot = self.percentile("tpot", "p50")
        return 1 / tpot if tpot > 0 else float("nan")

    @property
    def kept(self) -> bool:
        """Whether a valid run met the SLO."""
        slo = self.result["slo"]
        return bool(slo and slo["met"] and self.sound)

    @property
    def problems(self) -> list[str]:
        """Findings that invalidate the run, regardless of its figures."""
        return [
            str(each["text"])
            for each in self.result["findings"]
            if each["severity"] == "invalid" or each["code"] == "interrupted"
        ]

    @property
    def unjudged(self) -> str:
        """Reason why the run does not show whether the SLO is met, or the empty string.

        A saturated run does show it: the server has a limit.
        """
        codes = {f["code"] for f in self.result["findings"] if f["severity"] == "invalid"}
        accuracy = self.result.get("accuracy")
        if codes - {"over_saturated"} or self.result["interrupted"]:
            return "; ".join(self.problems)
        return "" if accuracy is None or accuracy["passed"] else said(accuracy)

    @property
    def sound(self) -> bool:
        """Whether the run is valid and its answers passed the accuracy gate."""
        accuracy = self.result.get("accuracy")
        return bool(self.result["valid"] and (accuracy is None or accuracy["passed"]))


def options_at(base: RunOptions, by: str, value: float, seconds: float | None) -> RunOptions:
    """Make a point's options: enough requests for `seconds` (None: as many as in the base).

    Each point has its own seed: another point's prompts would be in the prefix cache.
    """
    base = replace(base, seed=base.seed + round(value * 1000))
    if by == "rate":
        at = replace(base, arrivals=f"poisson:{value:g}", duration=None)
        return at if seconds is None else replace(at, requests=max(20, round(value * seconds)))
    users = max(1, round(value))
    return replace(base, arrivals=None, concurrency=users, duration=seconds)


def read_points(folders: Sequence[Path]) -> dict[str, list[Point]]:
    """Read finished sweeps by the names of their folders."""
    found = {}
    for folder in folders:
        try:
            data = json.loads((folder / "points.json").read_text())
            found[folder.name] = [Point(p["by"], p["value"], p["result"]) for p in data]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise InvalidRequest(
                f"{folder} holds no finished sweep ({error})", param="beside"
            ) from None
    return found


class Sweeper:
    """Runner of points, or reader of those in the folder."""

    def __init__(
        self,
        base: RunOptions,
        by: str,
        folder: Path | None,
        *,
        seconds: float | None = 30.0,
        run: Callable[[RunOptions, Path | None], dict[str, Any]] | None = None,
        gate: AccuracyGate | None = None,
    ) -> None:
        if by not in ("concurrency", "rate"):
            raise InvalidRequest("a sweep is by concurrency or rate", param="by")
        options_at(base, by, 1.0, seconds).verify()
        self.base, self.by, self.folder, self.seconds = base, by, folder, seconds
        self._run = run or (lambda options, place: run_bench(options, place).result)
        self._gate = gate

    def point(self, value: float) -> Point:
        """Return the point of a value, measured or read back, with the gate's verdict."""
        options = options_at(self.base, self.by, value, self.seconds)
        place = None if self.folder is None else self.folder / f"{self.by}-{value:g}"
        if place is not None and (place / "result.json").is_file():
            earlier = read_result(place)
            if earlier["options"] == options.public() and not earlier["interrupted"]:
                return Point(self.by, value, self._checked(options, earlier, place))
        return Point(self.by, value, self._checked(options, self._run(options, place), place))

    def _checked(
        self, options: RunOptions, result: dict[str, Any], place: Path | None
    ) -> dict[str, Any]:
        gate = self._gate
        if gate is None or result["interrupted"] or gate.passed(result) is not None:
            return result
        result["accuracy"] = gate.check(options, result)
        if place is not None:
            write_text(place / "result.json", json.dumps(result, indent=1))
        return result

    def sweep(self, values: Sequence[float]) -> Iterator[Point]:
        """Yield a point per value; end early if a run was interrupted."""
        for value in values:
            point = self.point(value)
            yield point
            if point.result["interrupted"]:
                return

    def search(
        self, on_point: OnPoint, *, start: float, limit: float, precision: float = 0.05
    ) -> Point | None:
        """Find the largest value whose run meets the SLO, or None if the start misses it.

        Doubles from `start` until the SLO is missed, then bisects until the interval is within
        `precision` of its upper end (or one user). Assumes that an SLO broken at one load is broken
        at every higher one.
        """
        if self.base.slo is None:
            raise InvalidRequest("a search needs an --slo", param="slo")
        parse_slo(self.base.slo)
        best: Point | None = None
        value, broken = start, math.inf
        users = self.by == "concurrency"
        while True:
            point = self.point(value)
            on_point(point)
            if point.result["interrupted"]:
                return best
            if point.kept:
                best = point
            else:
                broken = value
            if best is None or best.value >= limit:
                return best
            if broken == math.inf:
                value = min(limit, best.value * 2)
            elif broken - best.value > max(float(users), precision * broken):
                value = (best.value + broken) / 2
                value = float(int(value)) if users else value
            else:
                return best


def pareto(points: Sequence[Point], figure: str = "output_throughput") -> list[Point]:
    """Return the Pareto front of interactivity and throughput, sorted by interactivity."""

    def place(point: Point) -> tuple[float, float]:
        return point.interactivity, point.figure(figure)

    front = [
        point
        for point in points
        if not any(
            place(other) != place(point)
            and all(theirs >= mine for theirs, mine in zip(place(other), place(point), strict=True))
            for other in points
        )
    ]
    return sorted(front, key=lambda point: point.interactivity)


COLUMNS = (
    "load", "tok/s", "per device", "req/s", "tok/s per user", "TTFT p50", "TTFT p99", "ITL p50",
    "ITL p99", "cost/Mtok", "J/tok", "failed", "SLO", "accuracy", "valid",
)  # fmt: skip


def rows(points: Sequence[Point]) -> list[list[str]]:
    made = []
    for point in points:
        slo = point.result["slo"]
        made.append(
            [
                f"{point.value:g}",
                number(point.figure("output_throughput")),
                number(point.figure("output_throughput_per_device")),
                number(point.figure("request_throughput")),
                _known(point.interactivity),
                *(
                    _known(point.percentile(name, p) * 1e3, " ms")
                    for name in ("ttft", "itl")
                    for p in ("p50", "p99")
                ),
                _known(point.figure("cost_per_million_tokens")),
                _known(point.figure("joules_per_token")),
                f"{point.figure('failure_rate'):.1%}",
                "–" if slo is None else "met" if slo["met"] else "missed",
                lowest(point.result.get("accuracy")),
                "yes" if point.result["valid"] else "NO",
            ]
        )
    return made


def _known(value: float, unit: str = "") -> str:
    return "–" if math.isnan(value) else number(value) + unit


Sweeps = Mapping[str, Sequence[Point]]
"""Sweeps by name."""


def pareto_chart(sweeps: Sweeps, title: str, figure: str, unit: str) -> Chart:
    """Draw a figure over interactivity, with the front of each sweep.

    Points that are invalid, below the gate or without the figure are left out.
    """
    series = []
    for name, every in sweeps.items():
        points = [p for p in every if p.sound and not math.isnan(p.figure(figure))]
        front = pareto(points, figure) if figure in HIGHER else points
        series.append(
            Series(
                name,
                [p.interactivity for p in points],
                [p.figure(figure) for p in points],
                "points",
                [f"{name}: {p.by} {p.value:g}" for p in points],
                tags=[f"{p.value:g}" for p in points],
            )
        )
        series.append(
            Series(
                "front" if len(sweeps) == 1 else f"{name}, front",
                [p.interactivity for p in front],
                [p.figure(figure) for p in front],
                dashed=True,
            )
        )
    return Chart(title, "tok/s per user once it streams", unit, series)


HIGHER = ("output_throughput", "output_throughput_per_device")
PARETO = (
    ("Throughput against interactivity (Pareto)", "output_throughput", "tok/s of all users"),
    ("Per device against per user (Pareto)", "output_throughput_per_device", "tok/s per device"),
    ("Cost against interactivity", "cost_per_million_tokens", "price per million tokens"),
    ("Energy against interactivity", "joules_per_token", "J per token"),
)


def sweep_charts(points: Sequence[Point], others: Sweeps = MappingProxyType({})) -> list[Chart]:
    by = points[0].by
    label = "users" if by == "concurrency" else "requests/s offered"
    xs = [point.value for point in points]
    sweeps = {"this sweep" if others else "runs": points, **others}
    every = [point for each in sweeps.values() for point in each]
    several = any(point.result["options"].get("devices", 1) > 1 for point in every)
    return [
        *(
            pareto_chart(sweeps, title, figure, unit)
            for title, figure, unit in PARETO
            if (several or others or figure != "output_throughput_per_device")
            and any(not math.isnan(point.figure(figure)) for point in every)
        ),
        Chart(
            "Throughput",
            label,
            "tok/s",
            [Series("output", xs, [p.figure("output_throughput") for p in points])],
        ),
        *(
            Chart(
                title,
                label,
                "ms",
                [
                    Series(q, xs, [p.percentile(name, q) * 1e3 for p in points])
                    for q in ("p50", "p90", "p99")
                ],
                log_y=True,
            )
            for name, title in (("ttft", "Time to first token"), ("itl", "Inter-token latency"))
        ),
    ]


def sweep_page(
    points: Sequence[Point], best: Point | None = None, others: Sweeps = MappingProxyType({})
) -> str:
    first = points[0].result
    body = ""
    if best is not None:
        text = f"largest {best.by} within {best.result['slo']['text']}: {best.value:g}"
        body = notice(text, good=True)
    for point in points:
        if (accuracy := point.result.get("accuracy")) is not None and not accuracy["passed"]:
            body += notice(f"{point.by} {point.value:g}: {said(accuracy)}", good=False)
    ordered = sorted(points, key=lambda point: point.value)
    body += table(COLUMNS, rows(ordered))
    for name, other in others.items():
        body += table(COLUMNS, rows(other), title=name)
    body += charts(sweep_charts(ordered, others))
    return page(
        f"Headrace bench: sweep by {points[0].by}",
        f"{first['server']['model']} at {first['server']['url']} · {first['created']}",
        body,
    )

"""A predicted step as rows of text, as JSON, and as the roofline chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .counts import Case
from .hardware import Hardware
from .page import charts, page, table
from .plot import Chart, Series
from .step import OperatorTime, StepTime

COLUMNS = ("operator", "GFLOP", "MB", "FLOP/B", "bound", "limit ms", "ms", "share")


def digits(value: float) -> str:
    """Format with three significant digits at most, without exponents."""
    if value == 0:
        return "0"
    if value < 0.001:
        return "<.001"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(places, 0), 3)}f}"


def rows(time: StepTime) -> list[list[str]]:
    """Return one row per operator, in `COLUMNS`, then the overhead and the sum."""
    total = time.seconds
    result = []
    for item in time.operators:
        count = item.count
        label = "" if count.label == count.operator else f" {count.label}"
        result.append(
            [
                f"{count.operator}{label}" + (f" ×{count.calls}" if count.calls > 1 else ""),
                digits(count.flops * count.calls / 1e9),
                digits(count.bytes * count.calls / 1e6),
                digits(count.intensity),
                item.bound,
                digits(item.limit_seconds * 1e3),
                digits(item.seconds * 1e3),
                f"{item.seconds / total:.1%}",
            ]
        )
    overhead = time.overhead_seconds
    result.append(
        ["step overhead", "", "", "", "", "", digits(overhead * 1e3), f"{overhead / total:.1%}"]
    )
    result.append(
        [
            "sum",
            digits(time.flops / 1e9),
            digits(time.bytes / 1e6),
            digits(time.flops / time.bytes),
            time.bound,
            digits(time.limit_seconds * 1e3),
            digits(total * 1e3),
            "100%",
        ]
    )
    return result


def as_json(time: StepTime) -> dict[str, Any]:
    """Return everything in SI units."""
    counted = "operator label calls flops weight_bytes kv_bytes read_bytes write_bytes"
    return {
        **_named(time, "seconds limit_seconds overhead_seconds flops bytes bound tokens"),
        "operators": [
            _named(item.count, counted) | _named(item, "bound seconds limit_seconds")
            for item in time.operators
        ],
    }


def _named(of: object, names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names.split()}


NAMED = 5
"""Operators of a chart whose names stand next to them."""
NEAR = 3.0
"""Ratio of two places below which their names would overlap."""


def roofline_chart(
    case: Case,
    hardware: Hardware,
    time: StepTime,
    measured: Sequence[Series] = (),
    *,
    step: str = "",
) -> Chart:
    """Draw the ceilings, and each operator at its intensity with its predicted rate.

    The longest operators have their names next to them. `step`: the step's name, for the title.
    """
    compute = hardware.compute_type(case.weights.format, case.dtype)
    points = [item for item in time.operators if item.count.flops and item.seconds]
    intensities = [item.count.intensity for item in points] or [1.0]
    low, high = min(0.1, *intensities), max(10_000.0, *intensities)
    series = []
    for name in dict.fromkeys((compute, case.dtype, "float32")):
        if name in hardware.rates:
            rate = hardware.rates[name]
            ridge = rate / hardware.bandwidth
            xs = [low, ridge, high] if low < ridge < high else [low, high]
            ys = [min(rate, x * hardware.bandwidth) for x in xs]
            series.append(Series(f"{name} ceiling", xs, ys))
    series.append(
        Series(
            "operators, predicted",
            [item.count.intensity for item in points],
            [item.count.flops * item.count.calls / item.seconds for item in points],
            "points",
            [
                f"{item.count.operator} {item.count.label}: {item.seconds * 1e3:.3f} ms, "
                f"{item.bound}"
                for item in points
            ],
            tags=_names(points),
        )
    )
    return Chart(
        f"Roofline of {hardware.name}{step and f': {step}'}",
        "FLOP per byte",
        "FLOP/s",
        [*series, *measured],
        log_x=True,
        log_y=True,
    )


def _names(points: Sequence[OperatorTime]) -> list[str]:
    """Return the text next to each point: the longest operators' names, those of neighbours in
    one."""
    texts: dict[int, list[str]] = {}
    order = sorted(range(len(points)), key=lambda at: -points[at].seconds)
    for at in order[:NAMED]:
        near = (first for first in texts if _close(points[first], points[at]))
        texts.setdefault(next(near, at), []).append(points[at].count.label)
    return [", ".join(texts.get(at, ())) for at in range(len(points))]


def _close(one: OperatorTime, other: OperatorTime) -> bool:
    """Return whether the names of two points would overlap."""
    rates = [item.count.flops * item.count.calls / item.seconds for item in (one, other)]
    across = [item.count.intensity for item in (one, other)]
    return all(max(pair) < NEAR * min(pair) for pair in (rates, across))


def share_chart(time: StepTime, *, step: str = "") -> Chart:
    """Draw predicted and limit time per operator, largest first."""
    order = sorted(time.operators, key=lambda item: -item.seconds)[:8]
    places = range(1, len(order) + 1)
    return Chart(
        f"Time per operator{step and f': {step}'}",
        "",
        "ms",
        [
            Series("predicted", places, [item.seconds * 1e3 for item in order], "bars"),
            Series("limit", places, [item.limit_seconds * 1e3 for item in order], "marked"),
        ],
        names=[item.count.label for item in order],
    )


def html_page(
    title: str, case: Case, hardware: Hardware, steps: Sequence[tuple[str, StepTime]]
) -> str:
    """Build one page with table and charts for each named step."""
    body = ""
    for name, time in steps:
        body += table(COLUMNS, rows(time), title=name)
        body += charts(
            [roofline_chart(case, hardware, time, step=name), share_chart(time, step=name)]
        )
    source = f"{hardware.name}: {hardware.source}; efficiencies {hardware.efficiency.source}"
    return page(title, source, body)

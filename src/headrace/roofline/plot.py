"""Charts as data, drawn as inline SVG (no library, no network) or as PNG (with matplotlib)."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..base.extras import needing

COLOURS = ("#2563a8", "#d1622b", "#2e8b57", "#8a4fa3", "#b8860b", "#c23b5e", "#3b8ea5", "#6b7280")
WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 46
FEW_VALUES = 8
"""Number of values up to which a logarithmic axis has them as its ticks."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one colour: `mark` line, points, marked (they stand out), steps, bars or area."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    mark: str = "line"
    labels: Sequence[str] | None = None
    """Text shown when the pointer rests on a point."""
    dashed: bool = False
    tags: Sequence[str] = ()
    """Text next to the points, for few of them."""


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x: str
    """Label of the axis, with its unit."""
    y: str
    series: list[Series]
    log_x: bool = False
    log_y: bool = False
    notes: list[tuple[float, str]] = field(default_factory=list)
    """Vertical lines: (x, text)."""
    names: Sequence[str] = ()
    """Categories at x = 1, 2 …, in place of numbers."""


def ticks(low: float, high: float, *, log: bool, wanted: int = 6) -> list[float]:
    """Return round values between low and high: 1, 2 or 5 times a power of ten."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        steps: tuple[float, ...] = (1, 2, 5) if high / low < 300 else (1,)
        if high / low < 12:
            steps = (1, 1.5, 2, 3, 4, 5, 7)
        values = [m * 10.0**e for e in range(first, last + 1) for m in steps]
        return [value for value in values if low * 0.999 <= value <= high * 1.001]
    span = (high - low) or 1.0
    raw = span / wanted
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= raw)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Format a tick with three digits and a letter for thousands."""
    if value == 0:
        return "0"
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            value, low, high = (math.log10(max(v, 1e-300)) for v in (value, low, high))
        share = (value - low) / ((high - low) or 1.0)
        return self.start + min(max(share, -0.05), 1.05) * (self.end - self.start)


def _axis(values: list[float], start: float, end: float, *, log: bool, from_zero: bool) -> _Axis:
    usable = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    low, high = (min(usable), max(usable)) if usable else (1.0, 10.0)
    if log:
        low, high = low / 1.15, high * 1.15
        if high / low < 4:
            low, high = low / 2, high * 2
    else:
        low = min(0.0, low) if from_zero else low
        pad = (high - low) * 0.04 or abs(high) * 0.05 or 1.0
        high += pad
        low -= 0 if from_zero and low >= 0 else pad
    return _Axis(low, high, start, end, log)


def svg(chart: Chart) -> str:
    """Draw the chart as one `<svg>` element; text and axes take the page's colour."""
    xs = [float(x) for series in chart.series for x in series.xs]
    ys = [float(y) for series in chart.series for y in series.ys]
    legend = [series.name for series in chart.series if series.name]
    places = _legend_places(legend)
    top = TOP + (places[-1][1] - TOP + 12 if len(legend) > 1 else 0)
    if chart.names:
        xs = [0.4, len(chart.names) + 0.6]
    if chart.notes and ys:
        ys.append(max(ys) * 1.1)  # Room for their text above the highest mark.
    across = _axis(xs, LEFT, WIDTH - RIGHT, log=chart.log_x, from_zero=False)
    up = _axis(ys, HEIGHT - BOTTOM, top, log=chart.log_y, from_zero=not chart.log_y)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="chart" '
        f'aria-label="{html.escape(chart.title)}">',
        f'<text x="{LEFT}" y="18" class="title">{html.escape(chart.title)}</text>',
    ]
    parts += _grid(chart, across, up, top)
    if len(legend) > 1:
        for number, (name, (left, base)) in enumerate(zip(legend, places, strict=True)):
            colour = COLOURS[number % len(COLOURS)]
            parts.append(
                f'<rect x="{left}" y="{base - 9}" width="10" height="10" fill="{colour}"/>'
                f'<text x="{left + 14}" y="{base}" class="tick">{html.escape(name)}</text>'
            )
    for number, series in enumerate(chart.series):
        parts += _marks(series, COLOURS[number % len(COLOURS)], across, up)
    for number, (x, text) in enumerate(chart.notes):
        at_x = across.at(x)
        inside = at_x < WIDTH - RIGHT - 36
        side = f'x="{at_x + (4 if inside else -4):.1f}" class="tick{"" if inside else " end"}"'
        parts.append(
            f'<line x1="{at_x:.1f}" x2="{at_x:.1f}" y1="{top}" y2="{HEIGHT - BOTTOM}" '
            f'class="note"/><text {side} y="{top + 12 + 13 * number}">'  # Never on another note.
            f"{html.escape(text)}</text>"
        )
    return "".join([*parts, "</svg>"])


def _legend_places(names: Sequence[str]) -> list[tuple[int, int]]:
    """Return (x, baseline) of each name; a full line continues below."""
    places, x, y = [], LEFT, TOP + 3
    for name in names:
        wide = 26 + int(6.2 * len(name))
        if x > LEFT and x + wide > WIDTH - RIGHT:
            x, y = LEFT, y + 15
        places.append((x, y))
        x += wide
    return places


def _grid(chart: Chart, across: _Axis, up: _Axis, top: int) -> list[str]:
    parts = []
    for value, text in _x_ticks(chart, across):
        x = across.at(value)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{HEIGHT - BOTTOM}" class="grid"/>'
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" class="tick mid">{text}</text>'
        )
    for value in ticks(up.low, up.high, log=chart.log_y):
        y = up.at(value)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" class="tick end">{short(value)}</text>'
        )
    middle = (top + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}" class="label mid">'
        f"{html.escape(chart.x)}</text>"
        f'<text x="14" y="{middle:.0f}" class="label mid" '
        f'transform="rotate(-90 14 {middle:.0f})">{html.escape(chart.y)}</text>'
    )
    return parts


def _x_ticks(chart: Chart, across: _Axis) -> list[tuple[float, str]]:
    if chart.names:
        # As many as fit next to each other.
        wide = 6.6 * max(len(name) for name in chart.names) + 4
        every = math.ceil(wide / (across.at(2) - across.at(1)))
        named = list(enumerate(chart.names, 1))[::every]
        return [(n, html.escape(name)) for n, name in named]
    return [(v, short(v)) for v in ticks(across.low, across.high, log=chart.log_x)]


def _marks(series: Series, colour: str, across: _Axis, up: _Axis) -> list[str]:
    points = [
        (across.at(x), up.at(y))
        for x, y in zip(series.xs, series.ys, strict=True)
        if math.isfinite(x) and math.isfinite(y) and not (across.log and x <= 0)
    ]
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    parts = []
    if series.mark in ("line", "steps", "area") and points:
        path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        for x, y in points[1:]:
            path += f"H{x:.1f}V{y:.1f}" if series.mark == "steps" else f"L{x:.1f} {y:.1f}"
        if series.mark == "area":
            floor = up.at(up.low)
            parts.append(
                f'<path d="{path}L{points[-1][0]:.1f} {floor:.1f}L{points[0][0]:.1f} {floor:.1f}Z"'
                f' fill="{colour}" fill-opacity="0.18"/>'
            )
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
    if series.mark == "bars" and points:
        floor = up.at(max(up.low, 0.0) if not up.log else up.low)
        gap = min((b[0] - a[0] for a, b in itertools.pairwise(points)), default=24.0)
        for x, y in points:
            parts.append(
                f'<rect x="{x - gap * 0.45:.1f}" y="{min(y, floor):.1f}" width="{gap * 0.9:.1f}" '
                f'height="{abs(floor - y):.1f}" fill="{colour}" fill-opacity="0.8"/>'
            )
    if series.mark in ("points", "marked") or (series.mark == "line" and len(points) <= 40):
        radius = 3.2 if len(points) <= 200 else 1.8
        corner = ""
        if series.mark == "marked":
            radius, corner = 6.0, ' stroke="currentColor" stroke-width="1.4"'
        labels = series.labels or [
            f"{series.name} ({short(x)}, {short(y)})"
            for x, y in zip(series.xs, series.ys, strict=True)
        ]
        for (x, y), text in zip(points, labels, strict=False):
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{colour}" '
                f'fill-opacity="0.85"{corner}><title>{html.escape(text)}</title></circle>'
            )
        for (x, y), text in zip(points, series.tags, strict=False):
            side = "" if x < across.end - 90 else " end"
            parts.append(
                f'<text x="{x + (-9 if side else 9):.1f}" y="{y - 6:.1f}" class="tick{side}">'
                f"{html.escape(text)}</text>"
            )
    return parts


def _tick(value: float) -> str:
    """Format a tick; counts such as 1,024 stay in full."""
    whole = value == round(value) and 1000 < value < 100_000
    return f"{value:,.0f}" if whole and value % 1000 else short(value)


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Return the values themselves if they are few, else round ones; never values below 0."""
    own = sorted({v for v in values if v > 0 and math.isfinite(v)})
    if len(own) <= FEW_VALUES:
        return own
    return ticks(own[0], own[-1], log=True)


def write_png(items: Sequence[Chart], path: Path, columns: int = 2) -> None:
    """Draw all charts in one picture. Raises `PackageAbsent` without matplotlib."""
    with needing("PNG needs", "bench", param="png"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
    columns = min(columns, len(items))
    lines = -(-len(items) // columns)
    width = 7.2 if columns < 3 else 5.2
    figure = Figure(figsize=(width * columns, 4.3 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for number, chart in enumerate(items):
        axes = figure.add_subplot(lines, columns, number + 1)
        axes.set_title(chart.title, fontsize=10, loc="left")
        axes.set_xlabel(chart.x)
        axes.set_ylabel(chart.y)
        axes.set_xscale("log" if chart.log_x else "linear")
        axes.set_yscale("log" if chart.log_y else "linear")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        from_zero = not chart.log_y and all(y >= 0 for s in chart.series for y in s.ys)
        for index, series in enumerate(chart.series):
            colour = COLOURS[index % len(COLOURS)]
            xs, ys = list(series.xs), list(series.ys)
            for x, y, text in zip(xs, ys, series.tags, strict=False):
                axes.annotate(text, (x, y), (6, 5), textcoords="offset points", fontsize=8)
            if series.mark == "points":
                axes.plot(xs, ys, "o", ms=4, color=colour, label=series.name)
            elif series.mark == "marked":
                axes.plot(xs, ys, "D", ms=7, color=colour, mec="black", label=series.name)
            elif series.mark == "bars":
                gap = min((b - a for a, b in itertools.pairwise(xs)), default=0.8)
                axes.bar(xs, ys, gap * 0.9, color=colour, label=series.name)
            else:
                style = "steps-post" if series.mark == "steps" else "default"
                line = "--" if series.dashed else "-"
                dot = "o" if series.mark == "line" and len(xs) <= 40 else ""
                axes.plot(
                    xs, ys, line, drawstyle=style, color=colour, label=series.name, marker=dot, ms=4
                )
        for axis, log, values in (
            (axes.xaxis, chart.log_x, [x for s in chart.series for x in s.xs]),
            (axes.yaxis, chart.log_y, [y for s in chart.series for y in s.ys]),
        ):
            if log:
                found = (
                    _log_ticks(values) if axis is axes.xaxis else ticks(*axes.get_ylim(), log=True)
                )
                axis.set_major_locator(FixedLocator(found))
                axis.set_major_formatter(FuncFormatter(lambda value, _place: _tick(value)))
                axis.set_minor_locator(NullLocator())
        if chart.names:
            many = len(chart.names) > FEW_VALUES
            places = range(1, len(chart.names) + 1)
            axes.set_xticks(places, chart.names, fontsize=7, rotation=60 if many else 0)
        for x, text in chart.notes:
            axes.axvline(x, color="#888", ls=":", lw=1)
            axes.annotate(text, (x, 0.96), xycoords=("data", "axes fraction"), fontsize=8)
        if len(chart.series) > 1:
            axes.legend(fontsize=8, framealpha=0.7)
        if from_zero:
            axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)

"""Display of `headrace top`: figures with their last minute, requests, one line of help."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.process import NOTABLE
from .top_source import Reading

BARS = "▁▂▃▄▅▆▇█"
UNKNOWN = "–"
KEPT = 60
FULL, NEAR = 0.9, 0.6
"""Share of KV memory from which it is short, and of the roofline from which steps are near it."""


class Screen:
    """Screen that keeps the last minute of readings and draws it."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._history: deque[Reading] = deque(maxlen=KEPT)
        self.problem = ""

    def add(self, reading: Reading) -> None:
        self._history.append(reading)
        self.problem = ""

    def draw(self, height: int = 24, width: int = 80) -> RenderableType:
        """Draw the whole screen, in at most `height` lines."""
        now = self._history[-1] if self._history else Reading("nothing yet")
        head = Text.assemble(
            ("headrace top  ", "bold"),
            (now.model or self._where, "cyan"),
            (f"  {self._where}  from its {now.source}", "dim"),
        )
        head.truncate(width, overflow="ellipsis")
        parts: list[RenderableType] = [head]
        if self.problem:
            parts.append(Text(self.problem, style="yellow"))
        parts.append(Text())
        parts.append(self._figures(now, width))
        left = height - 15 - bool(self.problem)
        if now.requests and left > 2:
            parts += [Text(), _requests(now, left)]
        parts += [Text(), Text("q quits", style="dim")]
        return Group(*parts)

    def _figures(self, now: Reading, width: int) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(justify="right", no_wrap=True, min_width=9)
        table.add_column(no_wrap=True, style="dim", min_width=28)
        table.add_column(no_wrap=True, style="cyan")
        space = max(0, min(KEPT, width - 66))
        steps = f", {now.batch:.1f} a step" if now.batch else ""
        others = f"others have {share(now.others)} of CPUs"
        notes = {
            "running": f"{count(now.waiting)} waiting{steps}",
            "kv_usage": f"{now.preemptions:.0f} preempted" if now.preemptions else "",
            "roofline": others if (now.others or 0) > NOTABLE else "predicted / measured",
            "busy": f"{seconds(now.step_seconds)} a step" if now.step_seconds else "",
        }
        for name, field, form, top in FIGURES:
            values = [getattr(reading, field) for reading in self._history]
            shown, more = form(getattr(now, field)), notes.get(field, "")
            if form is latency:
                shown, more = shown
                values = [(one or {}).get("p50") for one in values]
            table.add_row(name, Text(shown, style="bold"), more, bars(values, space, top))
        return table


def _requests(now: Reading, lines: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("request", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("age", "prompt", "cached", "generated"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in now.requests[: lines - 1]:
        most = f"/{one['max_tokens']}" if one.get("max_tokens") else ""
        table.add_row(
            str(one["id"])[:32],
            "generating" if one["state"] == "decode" else "prompt",
            seconds(one["age"]),
            str(one["prompt_tokens"]),
            str(one["cached_tokens"]),
            f"{one['generated_tokens']}{most}",
        )
    return table


def line(reading: Reading) -> str:
    """Format a reading as one line, for a pipe."""
    gap = latency(reading.token_gap)
    first = latency(reading.first_token)
    return (
        f"generated {rate(reading.output_rate)}  prompt {rate(reading.prompt_rate)}  "
        f"running {count(reading.running)}  waiting {count(reading.waiting)}  "
        f"kv {share(reading.kv_usage)}  prefix {share(reading.prefix_share)}  "
        f"ttft {first[0]}  itl {gap[0]}  roofline {share(reading.roofline)}"
    )


def advice(reading: Reading) -> str:
    """Explain what limits a server at this moment, and what would help."""
    waiting = reading.waiting or 0
    if not (reading.running or waiting):
        return "nothing runs: ask again under load"
    found = []
    if waiting:
        full = (reading.kv_usage or 0) > FULL
        what, option = ("KV memory", "--kv-memory") if full else ("a place", "--max-sequences")
        found.append(f"requests wait for {what}: {option}, or more servers behind headrace route")
    if (reading.others or 0) > NOTABLE:
        found.append(f"other programs use {share(reading.others)} of the CPUs: cores of its own")
    if reading.roofline is not None and reading.roofline >= NEAR:
        found.append("steps are near the hardware's limit: headrace quantise, or a faster device")
    elif reading.roofline is not None:
        found.append(
            "steps are far from the hardware's limit: headrace profile shows the operators"
        )
    return "\n".join(found) or "no limit is seen"


def bars(values: list[float | None], space: int, top: float | None = None) -> str:
    """Draw a sparkline of the newest `space` values, with gaps for unknown ones."""
    shown = values[-space:] if space else []
    highest = top or max((value for value in shown if value is not None), default=0.0)
    if not highest:
        return ""
    last = len(BARS) - 1
    return "".join(
        " " if value is None else BARS[min(last, max(0, round(value / highest * last)))]
        for value in shown
    )


def count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"


def rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.{0 if value >= 100 else 1}f}/s"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value * 100:.{0 if value >= 0.1 else 1}f} %"


def seconds(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1000:.{0 if value >= 0.1 else 1}f} ms" if value < 1 else f"{value:.2f} s"


def latency(values: dict[str, float] | None) -> tuple[str, str]:
    """Format (the median, the tail)."""
    if not values:
        return UNKNOWN, ""
    return seconds(values["p50"]), f"p90 {seconds(values['p90'])}  p99 {seconds(values['p99'])}"


FIGURES: tuple[tuple[str, str, Callable[[Any], Any], float | None], ...] = (
    ("generated", "output_rate", rate, None),
    ("prompt", "prompt_rate", rate, None),
    ("first token", "first_token", latency, None),
    ("between tokens", "token_gap", latency, None),
    ("running", "running", count, None),
    ("KV cache", "kv_usage", share, 1.0),
    ("prefix hits", "prefix_share", share, 1.0),
    ("roofline", "roofline", share, 1.0),
    ("device busy", "busy", share, 1.0),
)
"""Title, field of a reading, its format, and the top of its bars; None: their maximum."""

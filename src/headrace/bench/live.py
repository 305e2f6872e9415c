"""The live view of a run in the terminal."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .report import HEADER, figure_rows, latency_rows, verdict
from .run import Progress

PERIOD = 0.25
LINE_PERIOD = 10.0
"""Seconds between two lines if there is no terminal."""


class LiveView:
    """Live view: `with LiveView(console) as view: run_bench(options, folder, view.watch)`."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._shown = time.monotonic()

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(self, *what: Any) -> None:
        self._live.__exit__(*what)

    def watch(self, progress: Progress) -> None:
        now, terminal = time.monotonic(), self._live.console.is_terminal
        if now - self._shown < (PERIOD if terminal else LINE_PERIOD):
            return
        self._shown = now
        if not terminal:
            self._live.console.print(_said(progress, now - progress.started), highlight=False)
            return
        self._live.update(self._render(progress, now - progress.started))

    def _render(self, progress: Progress, seconds: float) -> Group:
        done, total = float(len(progress.records)), float(max(1, progress.total))
        if progress.lasts is not None:
            done, total = min(seconds, progress.lasts), progress.lasts
        bar = ProgressBar(total=total, completed=done, width=60)
        return Group(Text(_said(progress, seconds)), bar)


def _said(progress: Progress, seconds: float) -> str:
    """Format a run's state as one line."""
    records = progress.records
    recent = [r for r in records[-200:] if r.ok and r.chunk_ns]
    failed = sum(record.error is not None for record in records)
    tokens = sum(record.tokens for record in records)
    text = f"{progress.phase}: {len(records)} of {progress.total} requests, {seconds:.0f} s"
    if progress.lasts is not None:
        text = f"{progress.phase}: {len(records)} requests, {seconds:.0f} of {progress.lasts:g} s"
    if recent:
        ttft = median((r.chunk_ns[0] - r.planned_ns) / 1e6 for r in recent)
        text += f" · {tokens / seconds:,.0f} tok/s · TTFT {ttft:,.0f} ms"
        gaps = [
            (r.chunk_ns[-1] - r.chunk_ns[0]) / 1e6 / (len(r.chunk_ns) - 1)
            for r in recent
            if len(r.chunk_ns) > 1
        ]
        if gaps:
            text += f" · ITL {median(gaps):,.1f} ms"
    return text + (f" · {failed} failed" if failed else "")


def show_result(console: Console, result: dict[str, Any]) -> None:
    """Print the summary after a run."""
    style = "bold" if result["valid"] else "bold red"
    console.print(Text(verdict(result), style=style))
    figures = Table.grid(padding=(0, 2))
    for title, value in figure_rows(result):
        figures.add_row(title, Text(value, style="bold"))
    console.print(figures)
    latency = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for index, column in enumerate(HEADER):
        latency.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in latency_rows(result):
        latency.add_row(*row)
    if latency.row_count:
        console.print(latency)
    colours = {"invalid": "red", "server": "yellow", "warning": "yellow"}
    for finding in result["findings"]:
        severity = finding["severity"]
        console.print(
            Text(f"{severity}: ", style=colours[severity]) + Text(finding["text"]), soft_wrap=True
        )

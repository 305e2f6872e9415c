"""`headrace roofline` of a Whisper: least time of a window and a token, and memory."""

from __future__ import annotations

import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..engine.hearing.options import SEQUENCES
from ..loader.towers import MOST_WINDOWS
from ..loader.whisper_files import open_whisper
from ..roofline.hardware import Hardware
from ..roofline.hearing import WINDOW, HearingPart, hearing_memory, token_parts, window_parts
from ..speech.finding import find

TOKENS = 100
"""Tokens of a window's text for which the rate is reported: those of English read aloud."""


def show_hearing(
    console: Console, model: str, hardware: Hardware, batch: int, *, plain: bool
) -> None:
    """Print tables, or with `plain` one JSON object. `batch`: sounds that decode in one step.

    Raises the errors of `find` and `open_whisper`.
    """
    sizes = open_whisper(find(model, offline=True)).arch
    parts = {
        "a window of 30 s": window_parts(sizes, sizes.frames),
        f"a token, {batch} at a time": token_parts(sizes, sizes.frames, batch),
    }
    seconds = {name: sum(one.seconds(hardware) for one in each) for name, each in parts.items()}
    window, token = seconds.values()
    rate = WINDOW / (window + TOKENS * token)
    memory = hearing_memory(sizes, MOST_WINDOWS, SEQUENCES)
    if plain:
        found = {name: [_told(one, hardware) for one in each] for name, each in parts.items()}
        print(json.dumps({**found, "rtfx": rate, "tokens": TOKENS, "memory": dict(memory)}))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "GFLOP", "MB", "at least, ms", "bound by"):
        table.add_column(column, justify="left" if column in ("", "bound by") else "right")
    for name, each in parts.items():
        table.add_row(name, "", "", f"{seconds[name] * 1e3:.3f}", "", style="bold")
        for one in each:
            told = _told(one, hardware)
            figures = f"{one.flops / 1e9:.3f}", f"{one.bytes / 1e6:.2f}"
            table.add_row(one.name, *figures, f"{told['seconds'] * 1e3:.3f}", str(told["bound"]))
    console.print(table)
    console.print(
        f"{hardware.name} ({hardware.source}), weights and cross K and V in eight bits\n"
        f"at most {rate:,.0f} seconds of sound a second, with {TOKENS} tokens a window; "
        "`bench hear --roofline` measures what a server reaches",
        soft_wrap=True,
    )
    for name, size in memory:
        console.print(f"{size / 1e6:>9,.1f} MB  {name}")
    console.print("room of windows and sequences is taken when they are first used", style="dim")


def _told(one: HearingPart, hardware: Hardware) -> dict[str, Any]:
    computing = one.flops / hardware.rate("int8")
    bound = "compute" if computing >= one.bytes / hardware.bandwidth else "bandwidth"
    return {**one._asdict(), "seconds": one.seconds(hardware), "bound": bound}

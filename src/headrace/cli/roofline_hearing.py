"""`headrace roofline` of a Whisper: time of a window and a token, and memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..base.groups import cross_groups, graph_groups, group_bytes
from ..bench.hearing_limit import WINDOW, token_step
from ..engine.hearing.options import SEQUENCES
from ..loader.towers import MOST_WINDOWS
from ..loader.whisper_files import open_whisper
from ..models.whisper import WhisperArch, describe_decoder, describe_encoder
from ..roofline.hardware import Hardware
from ..roofline.slices import part_work
from ..speech.finding import find

TOKENS = 100
"""Tokens of a window's text for which the rate is reported: typical for English read aloud."""
BLOCK = 16
"""Positions of a block of KV."""
Work = dict[str, Any]
"""Sums of one kind of work: name, flops, bytes (weights, K and V), compute and memory (seconds at
the limit), seconds (predicted)."""


def show_hearing(
    console: Console, model: str, hardware: Hardware, batch: int, *, plain: bool
) -> None:
    """Print tables, or with `plain` one JSON object. `batch`: sounds that decode in one step.

    Raises the errors of `find` and `open_whisper`.
    """
    sizes = open_whisper(find(model, offline=True)).arch
    step = token_step(sizes.text, hardware, TOKENS // 2, sizes.frames, batch)
    window = _summed(
        (one.label, one.flops, one.weight_bytes, *one.floor(hardware)[:2], one.seconds(hardware))
        for one in part_work(describe_encoder(sizes), sizes.frames, coded=True)
    )
    token = _summed(
        (
            one.count.operator if one.count.kind == "vector" else one.count.label,
            one.count.calls * one.count.flops,
            one.count.calls * (one.count.weight_bytes + one.count.kv_bytes),
            *one.floor[:2],
            one.seconds,
        )
        for one in step.operators
    )
    parts = {"a window of 30 s": window, f"a step of {batch} sounds": token}
    least = WINDOW / (_limit(window) + TOKENS * _limit(token) / batch)
    seconds = (sum(one["seconds"] for one in each) for each in parts.values())
    rate = WINDOW / (next(seconds) + TOKENS * next(seconds) / batch)
    read = sum(one.count.calls * one.count.weight_bytes for one in step.operators)
    memory = _memory(sizes, read + sum(one["bytes"] for one in window))
    if plain:
        rates = {"rtfx": least, "predicted_rtfx": rate, "tokens": TOKENS}
        print(json.dumps({**parts, **rates, "memory": memory}))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "GFLOP", "MB", "limit ms", "ms", "bound"):
        table.add_column(column, justify="left" if column in ("", "bound") else "right")
    for name, each in parts.items():
        whole = _limit(each), sum(one["seconds"] for one in each)
        table.add_row(name, "", "", *(f"{one * 1e3:.3f}" for one in whole), style="bold")
        for one in each:
            bound = "compute" if one["compute"] >= one["memory"] else "bandwidth"
            times = _limit([one]), one["seconds"]
            figures = f"{one['flops'] / 1e9:.3f}", f"{one['bytes'] / 1e6:.2f}"
            table.add_row(one["name"], *figures, *(f"{t * 1e3:.3f}" for t in times), bound)
    console.print(table)
    console.print(
        f"{hardware.name} ({hardware.source}), weights and cross K and V in eight bits\n"
        f"{rate:,.0f} seconds of sound a second, at most {least:,.0f}, with {TOKENS} tokens a "
        "window; `bench hear --roofline` measures what a server reaches",
        soft_wrap=True,
    )
    for name, size in memory.items():
        console.print(f"{size / 1e6:>9,.1f} MB  {name}")
    console.print("room of windows and sequences is taken when they are first used", style="dim")


def _summed(figures: Iterable[tuple[str, float, float, float, float, float]]) -> list[Work]:
    """Sum the figures of each name, in the order of first occurrence."""
    found: dict[str, Work] = {}
    for name, *each in figures:
        kinds = "flops", "bytes", "compute", "memory", "seconds"
        one = found.setdefault(name, {"name": name, **dict.fromkeys(kinds, 0.0)})
        for kind, figure in zip(kinds, each, strict=True):
            one[kind] += figure
    return list(found.values())


def _limit(works: list[Work]) -> float:
    """Return the least time of all together: both resources are busy all the time."""
    least: float = max(sum(one[kind] for one in works) for kind in ("compute", "memory"))
    return least


def _memory(sizes: WhisperArch, weights: float) -> dict[str, int]:
    """Return the bytes of a network's parts in eight bits, by name."""
    decoder = describe_decoder(sizes)
    across, own = (math.ceil(rows / BLOCK) for rows in (sizes.frames, sizes.context))
    crossed = cross_groups(decoder, "int8", MOST_WINDOWS * across)
    kept = graph_groups(decoder, "int8", SEQUENCES * own)
    return {
        "weights": round(weights),
        f"cross K and V, {MOST_WINDOWS} windows": group_bytes(crossed, BLOCK),
        f"own K and V, {SEQUENCES} sequences": group_bytes(kept, BLOCK),
    }

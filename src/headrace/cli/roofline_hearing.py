"""`headrace roofline` of a Whisper: time of a window and a token, and memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

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
from ..roofline.slices import least_seconds, part_work
from ..roofline.step import Floor, StepTime
from ..speech.finding import find

TOKENS = 100
"""Tokens of a window's text for which the rate is reported: those of English read aloud."""
BLOCK = 16
"""Positions of a block of KV."""


class HearingWork(NamedTuple):
    """Nodes of one kind: their work, their limit, their predicted time."""

    name: str
    flops: float
    bytes: float
    """Weights, K and V."""
    floor: Floor
    seconds: float

    def and_more(self, other: HearingWork) -> HearingWork:
        """Return the work of both."""
        floor = Floor(*map(sum, zip(self.floor, other.floor, strict=True)))
        flops, moved = self.flops + other.flops, self.bytes + other.bytes
        return HearingWork(self.name, flops, moved, floor, self.seconds + other.seconds)


def show_hearing(
    console: Console, model: str, hardware: Hardware, batch: int, *, plain: bool
) -> None:
    """Print tables, or with `plain` one JSON object. `batch`: sounds that decode in one step.

    Raises the errors of `find` and `open_whisper`.
    """
    sizes = open_whisper(find(model, offline=True)).arch
    step = token_step(sizes.text, hardware, TOKENS // 2, sizes.frames, batch)
    window = window_work(sizes, hardware)
    parts = {
        "a window of 30 s": window,
        f"a step of {batch} sounds": step_work(step),
    }
    least = least_seconds(one.floor for one in window) + TOKENS * step.limit_seconds / batch
    seconds = sum(one.seconds for one in window) + TOKENS * step.seconds / batch
    memory = hearing_memory(sizes, step, window)
    if plain:
        found = {name: [_told(one) for one in each] for name, each in parts.items()}
        rates = {"rtfx": WINDOW / least, "predicted_rtfx": WINDOW / seconds}
        print(json.dumps({**found, **rates, "tokens": TOKENS, "memory": dict(memory)}))
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("", "GFLOP", "MB", "limit ms", "ms", "bound"):
        table.add_column(column, justify="left" if column in ("", "bound") else "right")
    for name, each in parts.items():
        limit, predicted = least_seconds(one.floor for one in each), sum(one[-1] for one in each)
        table.add_row(name, "", "", f"{limit * 1e3:.3f}", f"{predicted * 1e3:.3f}", style="bold")
        for one in each:
            told = _told(one)
            figures = f"{one.flops / 1e9:.3f}", f"{one.bytes / 1e6:.2f}"
            times = f"{told['limit'] * 1e3:.3f}", f"{one.seconds * 1e3:.3f}"
            table.add_row(one.name, *figures, *times, str(told["bound"]))
    console.print(table)
    console.print(
        f"{hardware.name} ({hardware.source}), weights and cross K and V in eight bits\n"
        f"{WINDOW / seconds:,.0f} seconds of sound a second, at most {WINDOW / least:,.0f}, with "
        f"{TOKENS} tokens a window; `bench hear --roofline` measures what a server reaches",
        soft_wrap=True,
    )
    for name, size in memory:
        console.print(f"{size / 1e6:>9,.1f} MB  {name}")
    console.print("room of windows and sequences is taken when they are first used", style="dim")


def window_work(sizes: WhisperArch, hardware: Hardware) -> list[HearingWork]:
    """Return the work of encoding a whole window."""
    nodes = part_work(describe_encoder(sizes), sizes.frames, coded=True)
    return _summed(
        HearingWork(
            one.label, one.flops, one.weight_bytes, one.floor(hardware), one.seconds(hardware)
        )
        for one in nodes
    )


def step_work(step: StepTime) -> list[HearingWork]:
    """Return the work of a step of the decoder."""
    found = []
    for one in step.operators:
        count = one.count
        kept = count.calls * (count.weight_bytes + count.kv_bytes)
        name = count.label if count.kind != "vector" else count.operator
        found.append(HearingWork(name, count.calls * count.flops, kept, one.floor, one.seconds))
    return _summed(found)


def hearing_memory(
    sizes: WhisperArch, step: StepTime, window: list[HearingWork]
) -> list[tuple[str, int]]:
    """Return (name, bytes) of the parts of a network in eight bits.

    Room that no window or sequence has used yet is not touched. A process therefore begins with the
    first two rows and grows by a window and its sequences at a time.
    """
    decoder = describe_decoder(sizes)
    blocks = [math.ceil(rows / BLOCK) for rows in (sizes.frames, sizes.context)]
    across = group_bytes(cross_groups(decoder, "int8", MOST_WINDOWS * blocks[0]), BLOCK)
    own = group_bytes(graph_groups(decoder, "int8", SEQUENCES * blocks[1]), BLOCK)
    weights = sum(one.count.calls * one.count.weight_bytes for one in step.operators)
    return [
        ("weights", round(weights + sum(one.bytes for one in window))),
        (f"cross K and V, {MOST_WINDOWS} windows", across),
        (f"own K and V, {SEQUENCES} sequences", own),
    ]


def _summed(works: Iterable[HearingWork]) -> list[HearingWork]:
    """Sum works of one name, in the order of their first."""
    found: dict[str, HearingWork] = {}
    for one in works:
        found[one.name] = found[one.name].and_more(one) if one.name in found else one
    return list(found.values())


def _told(one: HearingWork) -> dict[str, Any]:
    bound = "compute" if one.floor.compute >= one.floor.memory else "bandwidth"
    figures = one._asdict() | {"limit": max(one.floor), "bound": bound}
    del figures["floor"]
    return figures

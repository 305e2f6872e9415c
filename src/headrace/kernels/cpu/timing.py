"""The time of every record that this process's teams run, for who profiles.

The library takes the times itself, from barrier to barrier, on the thread that called it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import records as kinds
from .library import Team
from .records import HrGateUp, HrHead, HrLinear, HrPart, HrRecord, HrStep

NAMES = {
    kinds.EMBED: "embed",
    kinds.NORM: "norm",
    kinds.LAYER_NORM: "norm",
    kinds.ADD: "add",
    kinds.QUANTISE: "quantise",
    kinds.LINEAR: "linear",
    kinds.GATE_UP: "gate_up",
    kinds.ROPE: "write",
    kinds.ATTENTION: "attend",
    kinds.BIDIRECTIONAL: "attend",
    kinds.GATED: "gated",
    kinds.ACTIVATE: "activate",
    kinds.SELECT: "select",
    kinds.SOFTCAP: "softcap",
    kinds.LORA_DOWN: "lora",
    kinds.LORA_UP: "lora",
    kinds.BOUND: "head",
    kinds.BEST: "head",
    kinds.PICK: "sample",
    kinds.SAMPLE: "sample",
    kinds.DRAW: "sample",
}


class Timed(NamedTuple):
    """One record of one call."""

    name: str
    shape: tuple[int, int] | None
    """(out, in) of a product."""
    decodes: bool
    """Did every entry of the step compute one token?"""
    seconds: float


@contextmanager
def timed() -> Iterator[list[Timed]]:
    """What ran while this lasts, in its order. For one thread that calls, as a profile has it."""
    found: list[Timed] = []
    plain = Team.run_at

    def run_at(self: Team, records: int, count: int, step: int, seconds: int | None = None) -> None:
        room = (ctypes.c_double * count)()
        plain(self, records, count, step, ctypes.addressof(room))
        if seconds is not None:
            ctypes.memmove(seconds, room, ctypes.sizeof(room))
        header = HrStep.from_address(step)
        for record, spent in zip((HrRecord * count).from_address(records), room, strict=True):
            found.append(
                Timed(NAMES[record.code], _shape(record), bool(header.n == header.b), spent)
            )

    Team.run_at = run_at  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Team.run_at = plain  # type: ignore[method-assign]


def _shape(record: HrRecord) -> tuple[int, int] | None:
    if record.code == kinds.GATE_UP:
        op = HrGateUp.from_address(record.op)
        return op.gate.out + op.up.out, op.gate.in_
    if record.code == kinds.LINEAR:
        linear = HrLinear.from_address(record.op)
    elif record.code in (kinds.BOUND, kinds.BEST):
        linear = HrHead.from_address(record.op).linear
    else:
        return None
    parts = (HrPart * linear.count).from_address(linear.parts)
    return sum(part.out for part in parts), parts[0].in_

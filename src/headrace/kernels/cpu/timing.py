"""Time of every record that this process's thread pools run, for profiling.

The library takes the times itself, from barrier to barrier, on the thread that called it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from ..timing import Timed
from . import records as kinds
from .library import Team
from .records import HrGateUp, HrHead, HrLinear, HrPart, HrRecord, HrStep
from .state_records import HrRecurrence

NAMES = {
    kinds.EMBED: "embed",
    kinds.SCATTER: "scatter",
    kinds.NORM: "norm",
    kinds.LAYER_NORM: "norm",
    kinds.ADD: "add",
    kinds.QUANTISE: "quantise",
    kinds.LINEAR: "linear",
    kinds.GATE_UP: "gate_up",
    kinds.ROPE: "write",
    kinds.ATTENTION: "attend",
    kinds.BIDIRECTIONAL: "attend",
    kinds.HEADS: "attend",
    kinds.COLUMNS: "attend",
    kinds.GATED: "gated",
    kinds.ACTIVATE: "activate",
    kinds.SELECT: "select",
    kinds.SOFTCAP: "softcap",
    kinds.SCALE: "scale",
    kinds.ROUTE: "route",
    kinds.PLACE: "experts",
    kinds.EXPERTS_UP: "experts",
    kinds.EXPERTS_DOWN: "experts",
    kinds.EXPERTS_SUM: "experts",
    kinds.LORA_DOWN: "lora",
    kinds.LORA_UP: "lora",
    kinds.BOUND: "head",
    kinds.BEST: "head",
    kinds.PICK: "sample",
    kinds.SAMPLE: "sample",
    kinds.DRAW: "sample",
    kinds.CONV: "short_conv",
    kinds.MULTIPLY: "multiply",
    kinds.EXCHANGE: "exchange",
    kinds.HANDOVER: "handover",
    kinds.AGREE: "head",
    kinds.LOWER: "head",
}


@contextmanager
def timed() -> Iterator[list[Timed]]:
    """Yield a list that records, in order, the operators that run meanwhile. For one calling
    thread, as in a profile."""
    found: list[Timed] = []

    def note(records: int, count: int, step: int, seconds: int) -> None:
        header = HrStep.from_address(step)
        decodes = bool(header.n == header.b)
        times = (ctypes.c_double * count).from_address(seconds)
        for record, spent in zip((HrRecord * count).from_address(records), times, strict=True):
            found.append(Timed(_name(record), _shape(record), decodes, spent))

    before, Team.watch = Team.watch, note
    try:
        yield found
    finally:
        Team.watch = before


def _name(record: HrRecord) -> str:
    if record.code == kinds.RECURRENCE:
        return "delta_rule" if HrRecurrence.from_address(record.op).b else "ssm"
    return NAMES[record.code]


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

"""Time of every record that this process's thread pools run, for profiling.

The library takes the times itself, from barrier to barrier, on the thread that called it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from ..timing import Timed
from .library import Team
from .records import CODES, STRUCTS, HrPart, HrRecord, HrStep

_OTHERS = {
    "embed": "EMBED BAGS",
    "norm": "NORM LAYER_NORM",
    "write": "ROPE",
    "attend": "ATTENTION BIDIRECTIONAL HEADS COLUMNS",
    "experts": "PLACE EXPERTS_UP EXPERTS_DOWN EXPERTS_SUM",
    "lora": "LORA_DOWN LORA_UP",
    "head": "BOUND BEST AGREE LOWER",
    "sample": "PICK SAMPLE DRAW",
    "short_conv": "CONV",
}
"""Operator → its records, unless a single one has its name."""
NAMES: dict[int, str] = {number: code.lower() for code, number in CODES.items()}
"""Operator by the code of a record."""
NAMES |= {CODES[code]: name for name, codes in _OTHERS.items() for code in codes.split()}


@contextmanager
def timed() -> Iterator[list[Timed]]:
    """Yield a list that records the operators that run meanwhile, in order. For one calling thread,
    as in a profile."""
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
    if record.code == CODES["RECURRENCE"]:
        return "delta_rule" if STRUCTS[record.code].from_address(record.op).b else "ssm"
    return NAMES[int(record.code)]


def _shape(record: HrRecord) -> tuple[int, int] | None:
    op = STRUCTS[record.code].from_address(record.op)
    if record.code == CODES["GATE_UP"]:
        return op.gate.out + op.up.out, op.gate.in_
    if record.code == CODES["LINEAR"]:
        linear = op
    elif record.code in (CODES["BOUND"], CODES["BEST"]):
        linear = op.linear
    else:
        return None
    parts = (HrPart * linear.count).from_address(linear.parts)
    return sum(part.out for part in parts), parts[0].in_

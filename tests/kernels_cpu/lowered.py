"""A recorded program as text: every field of every record, addresses as numbers of buffers."""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from headrace.kernels.arrays import address
from headrace.kernels.cpu import records
from headrace.kernels.cpu.arena import Buffer
from headrace.kernels.cpu.emit import QuantisedRows
from headrace.kernels.cpu.program import CpuProgram

LATER = {
    ("HrEmbed", "index"): 0,
    ("HrEmbed", "rows"): 0,
    ("HrLayerNorm", "weight_stride"): 0,
    ("HrLayerNorm", "bias_stride"): 0,
    ("HrPart", "low"): None,
    ("HrHead", "found"): None,
    ("HrHead", "first"): 0,
    ("HrHead", "lowest"): None,
    ("HrHead", "ranks"): 0,
    ("HrHead", "rank"): 0,
}
"""Fields that came after the freeze, with the value that says what was said without them."""
FORMER = {("HrRope", "first"): "unused", ("HrAttention", "across"): "unused"}
"""Fields that had no meaning at the freeze, and the name that they had."""


class Places:
    """Addresses by the order in which they come: of the program's own buffers with the place in
    them, so that who shares a buffer with whom is seen; of all else alone."""

    def __init__(self, program: CpuProgram) -> None:
        self._buffers = [extent(buffer) for _, buffer in program._arena.all]
        self._numbers: dict[object, int] = {}

    def of(self, at: int | None) -> str:
        if not at:
            return "-"
        for index, (begin, size) in enumerate(self._buffers):
            if begin <= at < begin + size:
                return f"buffer {self._number(('buffer', index))} + {at - begin}"
        return f"array {self._number(at)}"

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def extent(buffer: Buffer) -> tuple[int, int]:
    """Address and bytes."""
    if isinstance(buffer, QuantisedRows):
        return address(buffer.data), buffer.data.nbytes
    return address(buffer), len(buffer) * buffer.strides[0]


def lines(program: CpuProgram) -> Iterator[str]:
    places = Places(program)
    for name, (code, op) in zip(program.names, program._emitted, strict=True):
        yield f"{name} ({code}) {fields(op, places)}"


def fields(structure: ctypes.Structure, places: Places) -> str:
    shown = []
    for name, kind in structure._fields_:  # type: ignore[misc]
        value = getattr(structure, name)
        if LATER.get((type(structure).__name__, name), ...) == value:
            continue
        if isinstance(value, ctypes.Structure):
            text = fields(value, places)
        elif name == "parts":
            of = "HrPart" if isinstance(structure, records.HrLinear) else "HrLoraPart"
            part = records.HEADER.struct(of)
            array = (part * structure.count).from_address(value)
            text = " ".join(fields(each, places) for each in array)
        elif kind is ctypes.c_void_p:
            text = places.of(value)
        else:
            text = repr(value)
        shown.append(f"{FORMER.get((type(structure).__name__, name), name)}={text}")
    return "{" + ", ".join(shown) + "}"


def summary(program: CpuProgram) -> dict[str, Any]:
    """Summarise a program: counts of its records, bytes of its buffers, a digest of it all."""
    text = "\n".join(lines(program))
    return {
        "records": dict(Counter(name.split()[0] for name in program.names)),
        "buffers": sum(extent(buffer)[1] for _, buffer in program._arena.all),
        "digest": hashlib.sha256(text.encode()).hexdigest()[:16],
    }

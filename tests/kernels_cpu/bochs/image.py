"""Writes the memory image for guest.cpp: `python image.py FILE LIBRARY`, started by run.py.

Everything that the kernels read or write lies in one region at a fixed address, in this process as
in the guest, so that pointers hold in both. Each case is run here at level bf16, which leaves what
the guest shall find.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from ctypes import Structure, c_char, c_uint64
from pathlib import Path

import torch
from cpu_cases import KINDS, random_blocks

from headrace.kernels.cpu import emit, library
from headrace.kernels.cpu import records as r
from headrace.kernels.cpu.library import Team
from headrace.kernels.cpu.panels import pack

BASE, SIZE = 0x10000000, 64 << 20
SCRATCH = 8 << 20
PRIVATE_ANONYMOUS_AT_EXACTLY = 0x2 | 0x20 | 0x100000
SHAPES = ((16, 16, 256), (17, 40, 512), (31, 33, 768), (64, 130, 256), (45, 1, 1536))
GATES = ((16, 1, "silu"), (37, 3, "gelu_tanh"), (20, 2, "gelu"))


class Case(Structure):
    _fields_ = [
        ("record", c_uint64),
        ("step", c_uint64),
        ("scratch", c_uint64),
        ("counters", c_uint64),
        ("got", c_uint64),
        ("want", c_uint64),
        ("bytes", c_uint64),
        ("name", c_char * 64),
    ]


class Image:
    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        at = libc.mmap(
            ctypes.c_void_p(BASE),
            ctypes.c_size_t(SIZE),
            3,
            PRIVATE_ANONYMOUS_AT_EXACTLY,
            -1,
            ctypes.c_long(0),
        )
        assert at == BASE, "the region is taken"
        self.used = 64
        self.team = Team(1, "bf16")
        self.cases: list[Case] = []
        self.scratch = self.room(SCRATCH)

    def room(self, size: int) -> int:
        at = BASE + self.used
        self.used = (self.used + size + 63) // 64 * 64
        assert self.used <= SIZE
        return at

    def put(self, value: Structure) -> int:
        at = self.room(ctypes.sizeof(value))
        ctypes.memmove(at, ctypes.addressof(value), ctypes.sizeof(value))
        return at

    def tensor(self, value: torch.Tensor) -> int:
        at = self.room(value.nbytes)
        ctypes.memmove(at, value.contiguous().data_ptr(), value.nbytes)
        return at

    def packed(self, kind: str, out: int, width: int, seed: int) -> int:
        return self.tensor(pack(random_blocks(kind, out, width, seed), self.team).data)

    def quantised(self, x: torch.Tensor) -> r.HrQuantised:
        rows = emit.QuantisedRows(*x.shape)
        rows.data.zero_()
        record = emit.quantise(emit.matrix(x), rows.struct, x.shape[1], r.ROWS_N)
        self.team.run(emit.program([record]), 1, r.HrStep(n=len(x)))
        return r.HrQuantised(self.tensor(rows.data), rows.struct.stride)

    def case(
        self, name: str, code: int, op: Callable[[int], Structure], rows: int, before: torch.Tensor
    ) -> None:
        """`op(y)` is the record that writes to y; `before` is what lies there."""
        got, want = self.tensor(before), self.tensor(before)
        step = self.put(r.HrStep(n=rows))
        records = [self.put(r.HrRecord(code=code, op=self.put(op(y)))) for y in (got, want)]
        self.team.run(r.HrRecord.from_address(records[1]), 1, r.HrStep.from_address(step))
        size = before.nbytes
        assert ctypes.string_at(got, size) != ctypes.string_at(want, size), name
        counters = self.room(64)
        self.cases.append(
            Case(records[0], step, self.scratch, counters, got, want, size, name.encode())
        )

    def linear(self, kind: str, rows: int, out: int, width: int, seed: int) -> None:
        x = torch.randn(rows, width) * torch.logspace(-3, 3, rows).unsqueeze(1)
        if rows == 31:
            x[3, 7], x[9, 40] = float("nan"), float("inf")
        accumulate = rows == 45
        codes, data = self.quantised(x), self.packed(kind, out, width, seed)
        bias = self.tensor(torch.randn(out))

        def op(y: int) -> Structure:
            part = r.HrPart(data, bias, y, out, r.KINDS[kind], out, width, int(accumulate))
            return r.HrLinear(x=codes, parts=self.put(part), count=1, rows=r.ROWS_N)

        before = torch.randn(rows, out) if accumulate else torch.zeros(rows, out)
        self.case(f"linear {kind} {rows} rows {out} x {width}", r.LINEAR, op, rows, before)

    def gate_up(self, kind: str, rows: int, units: int, activation: str, seed: int) -> None:
        codes, out = self.quantised(torch.randn(rows, 512)), 32 * units
        data = [self.packed(kind, out, 512, seed + i) for i in range(2)]

        def op(y: int) -> Structure:
            gate, up = (r.HrPart(data=d, kind=r.KINDS[kind], out=out, in_=512) for d in data)
            room = r.HrQuantised(y, units)
            return r.HrGateUp(codes, gate, up, room, r.ACTIVATIONS[activation])

        blocks = -(-rows // r.SIX)
        before = torch.zeros(blocks * units * ctypes.sizeof(r.HrSix), dtype=torch.uint8)
        self.case(f"gate_up {kind} {rows} rows {activation}", r.GATE_UP, op, rows, before)

    def save(self, file: Path) -> None:
        cases = self.put((Case * len(self.cases))(*self.cases))  # type: ignore[arg-type]
        ctypes.memmove(BASE, struct.pack("<QQ", len(self.cases), cases), 16)
        file.write_bytes(ctypes.string_at(BASE, self.used))


def main() -> None:
    library.FILE = Path(sys.argv[2])
    torch.manual_seed(5)
    image = Image()
    for seed, kind in enumerate(KINDS):
        for shape in SHAPES:
            image.linear(kind, *shape, seed)
        for gate in GATES:
            image.gate_up(kind, *gate, 50 + seed)
        if not kind.endswith("K"):
            image.linear(kind, 19, 20, 96, seed)  # an odd number of units
    image.save(Path(sys.argv[1]))


if __name__ == "__main__":
    main()

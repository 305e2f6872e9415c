"""What a turn of a kernel's loop asks of its multiprocessor, read from nvdisasm's listing.

A kernel that should be bound by memory is only if nothing else takes longer than its bytes do: the
issue slots of four schedulers, the 128 bytes a cycle of shared memory, conversions at a fraction of
the rate. The whole kernel's counts do not show it and a table of registers neither, so what stands
in the loop is counted, each by its width and rate, and put beside the cycles that its bytes take.
Waits are not seen: what is said here is a bound, not a time.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_LABEL = re.compile(r"^(?P<label>[.$\w]+):")
_LINE = re.compile(
    r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9]*)(?P<forms>(?:\.\w+)*)"
    r"(?:.*`\((?P<target>[^)]+)\))?"
)
MATRIX = ("HMMA", "IMMA", "QMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCIMMA")
SHARED = ("LDS", "STS", "LDGSTS")
MATRICES = ("LDSM", "STSM")
SLOW = ("F2F", "F2I", "I2F")
"""Conversions at an eighth of the rate."""
PACKED = ("F2FP", "I2FP")
"""Conversions of two values, or of an integer: said nowhere at what rate; see `PACKED_RATES`."""
SLOW_RATE = 16
PACKED_RATES = (64, 16)
"""Lanes of a multiprocessor in a cycle: hoped, and as slow as other conversions."""
SHARED_RATE = 128
"""Bytes that shared memory gives or takes in a cycle."""
SCHEDULERS = 4
WARPGROUP_RATE = {"HGMMA": 2048, "QGMMA": 4096}
"""Products that the tensor cores of an sm_90 multiprocessor add in a cycle."""
BANDWIDTH = {"sm_80": 2.04e12 / 108 / 1.41e9, "sm_90": 4.8e12 / 132 / 1.755e9}
"""Bytes that memory gives each multiprocessor in a cycle, of an A100 80 GB and an H200."""


@dataclass(frozen=True, slots=True)
class Loop:
    """One turn of a loop, for one warp."""

    instructions: int
    matrix: int
    slow: int
    """Conversions of `SLOW`."""
    packed: int
    """Conversions of `PACKED`."""
    barriers: int
    shared_bytes: int
    """Read and written, asynchronous copies included."""
    global_bytes: int
    """Read, also of what L2 holds."""
    tensor: float
    """Cycles of the tensor cores of a multiprocessor, a quarter of a warpgroup's; sm_90 alone."""

    def cycles(self, warps: int, *, hoped: bool) -> dict[str, float]:
        """Cycles of a multiprocessor for one turn of all `warps` of a program, by what binds."""
        rate = PACKED_RATES[0 if hoped else 1]
        return {
            "instructions": self.instructions * warps / SCHEDULERS,
            "shared memory": self.shared_bytes * warps / SHARED_RATE,
            "conversions": 32 * warps * (self.slow / SLOW_RATE + self.packed / rate),
        }

    def share(self, architecture: str, warps: int, *, hoped: bool) -> tuple[float, str]:
        """→ (share that the loop leaves possible of the bandwidth, or where it is more of the
        warpgroups' rate; what binds it then)."""
        if architecture not in BANDWIDTH or not self.global_bytes:
            return 1.0, "-"
        aims = {
            "memory": self.global_bytes * warps / BANDWIDTH[architecture],
            "tensor cores": self.tensor * warps,
        }
        aim, wanted = max(aims.items(), key=lambda each: each[1])
        what, most = max(self.cycles(warps, hoped=hoped).items(), key=lambda each: each[1])
        return (1.0, aim) if most <= wanted else (wanted / most, what)


def main_loop(listing: str) -> Loop | None:
    """The innermost loop that multiplies most, of equals the longest; None: none multiplies."""
    code: list[re.Match[str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label["label"]] = len(code)
        elif instruction := _LINE.match(line):
            code.append(instruction)
    spans = [
        (labels[each["target"]], place)
        for place, each in enumerate(code)
        if each["opcode"] == "BRA" and labels.get(each["target"], place + 1) <= place
    ]
    # A loop is inner where no other lies within it.
    inner = [
        (first, last)
        for first, last in spans
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
    ]
    loops = [count_loop(code[first : last + 1]) for first, last in inner]
    found = max(loops, key=lambda loop: (loop.matrix, loop.instructions), default=None)
    return found if found is not None and found.matrix else None


def count_loop(code: list[re.Match[str]]) -> Loop:
    """What stands in these lines."""
    opcodes = [each["opcode"] for each in code]
    return Loop(
        instructions=len(code),
        matrix=sum(each in MATRIX for each in opcodes),
        slow=sum(each in SLOW for each in opcodes),
        packed=sum(each in PACKED for each in opcodes),
        barriers=sum(each == "BAR" for each in opcodes),
        shared_bytes=sum(
            warp_bytes(each["opcode"], each["forms"])
            for each in code
            if each["opcode"] in (*SHARED, *MATRICES)
        ),
        global_bytes=sum(
            warp_bytes(each["opcode"], each["forms"])
            for each in code
            if each["opcode"] in ("LDG", "LDGSTS")
        ),
        tensor=sum(
            math.prod(map(int, each["forms"].split(".")[1].split("x")))
            / (4 * WARPGROUP_RATE[each["opcode"]])
            for each in code
            if each["opcode"] in WARPGROUP_RATE
        ),
    )


def warp_bytes(opcode: str, forms: str) -> int:
    """Bytes that one instruction moves for the 32 lanes of a warp."""
    parts = forms.split(".")
    if opcode in MATRICES:
        # 8 by 8 matrices of 16 bits.
        return 128 * int(parts[-1] if parts[-1] in ("2", "4") else 1)
    widths = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
    return 32 * next((widths[part] for part in reversed(parts) if part in widths), 4)

"""What the compiler made of a kernel's rounding, read from its PTX.

Where rows must not depend on what else is in a step, the same sum has to be rounded in the same
way on every path of the code. A multiplication in front of an addition may become one instruction
with one rounding, or stay two with two, as the code around it allows; the interpreter, which rounds
every operation, does not see it.
"""

from __future__ import annotations

import re
from collections import Counter

_DEFINED = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)\s+(%\w+),")
_EXPONENT = re.compile(r"^\s*(?:@!?%p\d+\s+)?ex2[\w.]*\s+%\w+,\s*(%\w+);")
_LABEL = re.compile(r"^\$?[\w$]+:")
FEW = 8
"""Exponentials of a block of code up to which it is no loop over scores."""


def exponent_sources(ptx: str) -> list[dict[str, int]]:
    """By what instructions the arguments of exponentials are made, for each block of code that has
    more than `FEW` of them: instruction → count."""
    made: dict[str, str] = {}
    blocks: list[list[str]] = [[]]
    for line in ptx.splitlines():
        if _LABEL.match(line):
            blocks.append([])
        elif exponent := _EXPONENT.match(line):
            blocks[-1].append(exponent[1])
        if defined := _DEFINED.match(line):
            made[defined[2]] = defined[1]
    counted = (Counter(made.get(name, "elsewhere") for name in block) for block in blocks)
    return [dict(sorted(found.items())) for found in counted if found.total() > FEW]

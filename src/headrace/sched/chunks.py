"""The amount of prompts that a step computes with pipeline stages.

While a prompt's first chunk is in the first stage the others wait. While its last one is in the
last stage those before it wait. In n equal chunks U units take the time of n + S − 1 chunks on S
stages. But each step reads all weights, which takes as long as `EACH` units: (n + S − 1) · (EACH +
U / n), the least where n² = (S − 1) · U / EACH. Equal chunks are the best: their time is their sum
and S − 1 times the longest.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

from .limits import Limits
from .work import NO_ROW, Work

EACH = 8
"""Units of a prompt that take as long as a step's fixed time. By the times of one token and of 512
of the default model: 7.5 on a Zen 5 and 10 on an Emerald Rapids. Half or twice as much makes a
prompt of 512 slower by 2 %."""


class EqualChunks:
    """The size of chunks, which stays while there are prompts to compute, and grows with them."""

    __slots__ = ("_between", "_most", "_size")

    def __init__(self, limits: Limits) -> None:
        self._between, self._most = limits.stages - 1, limits.step_tokens
        self._size = 0

    def room(self, works: Iterable[Work]) -> int:
        """Return the units of prompts that the next step may compute. `works` have some that no
        step has been planned for. An atom that cannot be cut always fits."""
        if not self._between:
            return self._most
        left = atom = 0
        for work in works:
            left += work.known - (work.scheduled if work.row != NO_ROW else 0)
            atom = max(atom, min(work.atom, work.known))
        if not left:
            self._size = 0
            return 0
        chunks = max(1, isqrt(self._between * left // EACH))
        self._size = max(self._size, -(-left // chunks))
        return min(self._most, max(self._size, atom))

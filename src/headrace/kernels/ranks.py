"""Exchanges of arrays between the ranks of a model whose nodes run one by one.

Ranks write their columns to memory that all of them read, or that a wire fills; then they meet.
Nothing is summed, so values have the same bits as with a single rank. All ranks of a stage
interpret the same nodes, and take the same rooms in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..base.exchange import ExchangeSpec
from .arrays import Array, floats_like, host, joined

if TYPE_CHECKING:
    from .dealing import Dealing

ROOM = 16 << 20
"""Bytes exchanged at once; a larger value is exchanged in parts."""


class Meeting(Protocol):
    """Fences of the ranks of a stage, and links between stages. All methods raise `EngineFault` if
    a rank is gone or runs something else."""

    def meet(self, sign: int) -> None:
        """Wait for the other ranks, which must bring the same sign."""
        ...

    def exchange(self, room: Array, bounds: Sequence[int]) -> None:
        """Wait until each rank r has written its bytes of `room` [bytes], `bounds[r]` : `bounds[r +
        1]`."""
        ...

    def hand(self, rows: Array, step: int, most: int) -> None:
        """Hand fp32 `rows` [N, D], at most `most`, to the next stage (`step` 1), or fill them with
        those of the preceding stage (-1)."""
        ...


class RankMemory(Meeting, Protocol):
    """Memory that ranks share, with fences that need no library: see `dist.commons`."""

    ranks: int
    """Number of ranks with the same layers as this one; `rank` is this one's number."""
    rank: int
    stages: int
    stage: int
    process: int

    @property
    def fence(self) -> int: ...

    def take(self, size: int) -> Array: ...
    def link(self, giver: int, size: int) -> Array: ...
    def begin_anew(self) -> None: ...
    def tear(self) -> None: ...


class Ranks:
    """A rank's exchanges with the others, on fp32 arrays in host memory."""

    def __init__(self, memory: RankMemory, meeting: Meeting, most: int) -> None:
        """`most`: most rows that a stage hands on at once."""
        self.memory, self.meet, self._meeting, self._most = memory, meeting.meet, meeting, most
        self._rooms: list[Array] = []
        self._kept: dict[tuple[bool, int, int], Array] = {}
        """Rooms of `rooms`, by turn, number and size."""
        self._turn = False

    def begin_anew(self) -> None:
        """Give up all rooms: later ones are taken in the same order."""
        self.memory.begin_anew()
        self._rooms.clear()
        self._kept.clear()

    def rooms(self) -> Callable[[int], Array]:
        """Return an allocator of rooms, which are valid until the second next call: a rank may
        still read the rooms of the last one."""
        self._turn, numbers = not self._turn, count()

        def take(size: int) -> Array:
            whole = 1 << (size - 1).bit_length()
            key = self._turn, next(numbers), whole
            if key not in self._kept:
                self._kept[key] = self.memory.take(whole)
            return self._kept[key][:size]

        return take

    def gather(self, mine: Array, bounds: Sequence[int]) -> Array:
        """Combine each rank's columns [N, ·] into [N, bounds[-1]]."""
        at_once = max(1, ROOM // (4 * max(1, bounds[-1])))
        parts = [
            self._gather(mine[first : first + at_once], bounds)
            for first in range(0, len(mine), at_once)
        ]
        return joined(parts, 0) if parts else floats_like(mine, 0, bounds[-1])

    def _gather(self, mine: Array, bounds: Sequence[int]) -> Array:
        if not self._rooms:
            self._rooms = [self.memory.take(ROOM) for _ in range(2)]
        # A rank that is ahead writes to the other room: it cannot pass the next meeting.
        room = self._rooms.pop(0)
        self._rooms.append(room)
        rows, whole = len(mine), floats_like(mine, len(mine), bounds[-1])
        room = room[: 4 * rows * bounds[-1]].view(np.float32)
        blocks = [
            room[rows * first : rows * last].reshape(rows, last - first)
            for first, last in pairwise(bounds)
        ]
        blocks[self.memory.rank][:] = host(mine)
        self._meeting.exchange(room.view(np.uint8), [4 * rows * bound for bound in bounds])
        np.concatenate(blocks, 1, out=host(whole))
        return whole

    def receive(self, rows: int, width: int, like: Array) -> Array:
        """Return rows [N, D] of the preceding stage, as an array of `like`'s kind."""
        found = floats_like(like, rows, width)
        self._hand(host(found), -1)
        return found

    def hand_on(self, rows: Array) -> None:
        """Hand rows [N, D] to the next stage, if there is one."""
        if self.memory.stage + 1 < self.memory.stages:
            self._hand(np.ascontiguousarray(host(rows)), 1)

    def _hand(self, rows: Array, step: int) -> None:
        for first in range(0, len(rows), self._most):
            self._meeting.hand(rows[first : first + self._most], step, self._most)


class ExpertShare(NamedTuple):
    """A rank's part of a mixture: inner columns of every expert, or whole experts."""

    ranks: Ranks
    inner: ExchangeSpec | None
    dealing: Dealing | None = None
    mixture: int = 0

    def gathered(self, inner: Array) -> Array:
        """Return all columns between up and down, given this rank's columns."""
        return inner if self.inner is None else self.ranks.gather(inner, self.inner.bounds)

    def owns(self, expert: int, rows: int) -> bool:
        """Return whether this rank computes an expert's rows; count the expert's cost if it is
        placed on a rank."""
        if self.dealing is None:
            return True
        self.dealing.went[self.mixture][expert] += 8 + rows
        return int(self.dealing.owners[self.mixture][expert]) == self.dealing.rank

    def result(self, expert: int, part: Array, width: int) -> Array:
        """Return an expert's results [rows, width]. `part`: this rank's columns, empty if the
        expert is on another rank."""
        if self.dealing is None:
            return part
        owner = int(self.dealing.owners[self.mixture][expert])
        bounds = [0] * (owner + 1) + [width] * (self.dealing.ranks - owner)
        return self.ranks.gather(part, bounds)

"""Meetings of ranks by the library, as records. So ranks that interpret can meet stages that run
lowered programs, and ranks on other hosts."""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import Array
from ..ranks import Meeting, RankMemory
from . import emit
from .arena import link_bytes
from .library import LibraryAbsent, Team, meet
from .records import HrStep


class LibraryMeeting:
    """See `ranks.Meeting`."""

    def __init__(self, memory: RankMemory) -> None:
        """Raises `LibraryAbsent`."""
        self._memory, self._team = memory, Team(1)

    def meet(self, sign: int) -> None:
        meet(self._memory.fence, self._memory.ranks, sign)

    def exchange(self, room: Array, bounds: Sequence[int]) -> None:
        piece = emit.piece(room.reshape(1, -1), bounds, -1)
        self._run(emit.exchange(self._memory, 0, [piece]), len(room))

    def hand(self, rows: Array, step: int, most: int) -> None:
        memory, width = self._memory, rows.shape[1]
        giver = memory.process - (memory.ranks if step < 0 else 0)
        link = memory.link(giver, link_bytes(most, width))
        given = link, emit.matrix(rows), width, most, step
        self._run(emit.handover(memory, *given), len(rows))

    def _run(self, record: emit.Emitted, rows: int) -> None:
        self._team.run(emit.program([record]), 1, HrStep(n=rows))


def meeting_of(memory: RankMemory) -> Meeting:
    """Return the library's meetings, or those of the memory if there is no library."""
    try:
        return LibraryMeeting(memory)
    except LibraryAbsent:
        return memory

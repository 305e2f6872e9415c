"""Sockets in place of the memory that ranks of one host share."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32

from .library import load


class Wire:
    """Sockets by which the ranks of a fence meet, which share no memory: see csrc/wire.h."""

    def __init__(self, fence: int, ranks: int, rank: int, sockets: Sequence[int]) -> None:
        """`fence` is this process's own; `sockets`: descriptors by rank, -1 for the own one, open
        until `close`."""
        self._fence = fence
        load().hr_wire(fence, ranks, rank, (c_int32 * ranks)(*sockets))

    @property
    def culprit(self) -> int | None:
        """The rank that was gone when the group ended."""
        found = load().hr_wire_culprit(self._fence)
        return None if found < 0 else int(found)

    def close(self) -> None:
        """Nobody may be meeting any more."""
        load().hr_wire_free(self._fence)

"""Sockets in place of the memory that ranks of one host share."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32

from ..ranks import RankMemory
from .library import load


class Wire:
    """Sockets through which ranks without shared memory meet at a fence: see csrc/wire.h."""

    def __init__(self, commons: RankMemory, sockets: Sequence[int]) -> None:
        """`commons` is this process's own. `sockets`: descriptors by process, stage by stage, -1
        for its own; they stay open until `close`."""
        self._fence = commons.fence
        count, stages = len(sockets), commons.stages
        given = (c_int32 * count)(*sockets)
        load().hr_wire(self._fence, count, commons.process, stages, given)

    @property
    def culprit(self) -> int | None:
        """Rank that was gone when the group ended."""
        found = load().hr_wire_culprit(self._fence)
        return None if found < 0 else int(found)

    def close(self) -> None:
        """Free the sockets' state; no rank may be in a meeting."""
        load().hr_wire_free(self._fence)

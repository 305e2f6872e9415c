"""Shared-memory arena of the processes of one host: a fence for each stage, and exchanged values.

It is a file of the system's memory without a name (`memfd`), handed down by its descriptor:
/dev/shm has 64 MB in most containers. Ranks take the same rooms in the same order, so that the n-th
room of one is the n-th room of all. Pages have memory once they are written.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

SIZE = 1 << 38
"""Size of the file, which uses no more memory than its rooms."""
_FENCE, _BROKEN = 256, 128
"""Bytes of a fence, and offset of its mark that a rank is gone (kernels/cpu/csrc/ranks.h)."""
_FENCES = 4 * mmap.PAGESIZE
"""Bytes of the fences of all possible stages."""


def make_commons() -> int:
    """Return the descriptor of a new commons; the caller closes it."""
    descriptor = os.memfd_create("headrace ranks")
    os.ftruncate(descriptor, SIZE)
    return descriptor


class Commons:
    """A commons as one process sees it; the process is `rank` of `ranks` of a stage."""

    def __init__(self, descriptor: int, processes: int, process: int, stages: int = 1) -> None:
        self.ranks, self.stages, self.process = processes // stages, stages, process
        self.stage, self.rank = divmod(process, self.ranks)
        self._descriptor = descriptor
        self._fences = np.frombuffer(mmap.mmap(descriptor, _FENCES), np.uint8)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start over: later calls of `take` give the rooms that were taken before, in the same
        order."""
        each = SIZE // (self.stages + 1) // mmap.PAGESIZE * mmap.PAGESIZE
        self._next = [(self.stage + 1) * each, _FENCES]

    @property
    def fence(self) -> int:
        """Address of the fence of this stage."""
        at: int = self._fences.__array_interface__["data"][0]
        return at + self.stage * _FENCE

    def take(self, size: int, *, between: bool = False) -> npt.NDArray[Any]:
        """Take room for `size` bytes, uint8, for this stage's ranks, or for all processes
        (`between` stages). It holds zeros unless a process has written there."""
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        room = mmap.mmap(self._descriptor, whole, offset=self._next[between])
        self._next[between] += whole
        return np.frombuffer(room, np.uint8)[:size]

    def tear(self) -> None:
        """Mark a process as gone: processes that wait for it at a fence give up, now and later."""
        self._fences.view(np.uint32)[_BROKEN // 4 :: _FENCE // 4] = 1

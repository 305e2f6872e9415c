"""Shared-memory arena of the processes of one host: a fence for each stage, and exchanged values.

It is an anonymous memory file (`memfd`), inherited by its descriptor: /dev/shm has 64 MB in most
containers. Ranks take the same rooms in the same order, so the n-th room of one is the n-th room of
all. Pages use memory once they are written.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import EngineFault

SIZE = 1 << 38
"""Size of the file, which uses no more memory than its written rooms."""
_FENCE, _BROKEN = 256, 128
"""Bytes of a fence, and the offset of its mark for a lost rank (kernels/cpu/csrc/ranks.h)."""
_FENCES = 4 * mmap.PAGESIZE
"""Bytes of the fences of all possible stages."""
_LINE, _WORDS = 64, 64 * 64
"""Bytes of a process's words, and of all processes' words."""
_MET, _SIGNS, _GIVEN, _TAKEN = 0, 1, 3, 4
"""A process's words: its meetings, the signs of the last two, rows handed on and received."""
_STRANGERS = 2
"""Mark of a fence whose ranks brought different signs."""
_LONGEST = 1e-3
"""Longest pause between two polls, in seconds."""


def make_commons() -> int:
    """Return the descriptor of a new arena; the caller closes it."""
    descriptor = os.memfd_create("headrace ranks")
    os.ftruncate(descriptor, SIZE)
    return descriptor


class Commons:
    """An arena as one process sees it; the process is `rank` of `ranks` of a stage."""

    def __init__(self, descriptor: int, processes: int, process: int, stages: int = 1) -> None:
        self.ranks, self.stages, self.process = processes // stages, stages, process
        self.stage, self.rank = divmod(process, self.ranks)
        self._descriptor = descriptor
        self._fences = np.frombuffer(mmap.mmap(descriptor, _FENCES), np.uint8)
        self._words = np.frombuffer(mmap.mmap(descriptor, _FENCES + _WORDS), np.uint64)
        self._words = self._words[_FENCES // 8 :].reshape(-1, _LINE // 8)
        self._ordered = threading.Lock()
        self._ordered.acquire()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Start over: later calls of `take` return the rooms taken before, in the same order."""
        each = SIZE // (self.stages + 1) // mmap.PAGESIZE * mmap.PAGESIZE
        self._next = [(self.stage + 1) * each, _FENCES + _WORDS]
        self._links: dict[int, npt.NDArray[Any]] = {}

    @property
    def fence(self) -> int:
        """Address of the fence of this stage."""
        at: int = self._fences.__array_interface__["data"][0]
        return at + self.stage * _FENCE

    def take(self, size: int) -> npt.NDArray[Any]:
        """Take a room of `size` bytes, uint8, for this stage's ranks. It holds zeros unless a
        process has written there."""
        return self._take(size, between=False)

    def link(self, giver: int, size: int) -> npt.NDArray[Any]:
        """Return the room of `size` bytes through which process `giver` hands rows to the next
        stage. All processes take all of these rooms, in the same order."""
        for process in range(len(self._links), self.ranks * (self.stages - 1)):
            self._links[process] = self._take(size, between=True)
        return self._links[giver]

    def _take(self, size: int, *, between: bool) -> npt.NDArray[Any]:
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        room = mmap.mmap(self._descriptor, whole, offset=self._next[between])
        self._next[between] += whole
        return np.frombuffer(room, np.uint8)[:size]

    def tear(self) -> None:
        """Mark a process as gone: processes that wait for it at a fence give up, now and later."""
        self._fences.view(np.uint32)[_BROKEN // 4 :: _FENCE // 4] = 1

    # Meetings without the library of the CPU kernels (`kernels.ranks.Meeting`): ranks poll each
    # other's words; each word has one writer.

    def meet(self, sign: int) -> None:
        """Wait for the other ranks of this stage, which must bring the same sign. Raises
        `EngineFault`."""
        self._check()
        words = self._words[self.stage * self.ranks : (self.stage + 1) * self.ranks]
        number = int(words[self.rank, _MET]) + 1
        signs = _SIGNS + number % 2  # A rank can be ahead by one meeting.
        words[self.rank, signs] = sign
        self._keep_order()
        words[self.rank, _MET] = number
        self._wait(lambda: bool((words[:, _MET] >= number).all()))
        if (words[:, signs] != sign).any():
            self._mark(_STRANGERS)
        self._check()

    def exchange(self, room: npt.NDArray[Any], bounds: Sequence[int]) -> None:
        """Meet: all ranks have written their part of `room`."""
        self.meet(len(room))

    def hand(self, rows: npt.NDArray[Any], step: int, most: int) -> None:
        """Hand fp32 `rows` [N, D] to the next stage (`step` 1), or fill them with those of the
        preceding stage (-1). Raises `EngineFault`."""
        width, peer = rows.shape[1], self.process + step * self.ranks
        giver, taker = sorted((self.process, peer))
        room = self.link(giver, 8 + 4 * most * width)
        there = room[8 : 8 + rows.nbytes].view(np.float32).reshape(rows.shape)
        given, taken = self._words[giver, _GIVEN:], self._words[taker, _TAKEN:]
        self._wait(lambda: bool(given[0] == taken[0]) == (step > 0))
        if step > 0:
            room[:8].view(np.uint64)[0], there[:] = len(rows), rows
        elif room[:8].view(np.uint64)[0] != len(rows):
            self._mark(_STRANGERS)
            self._check()
        else:
            rows[:] = there
        self._keep_order()
        (given if step > 0 else taken)[0] += 1

    def _wait(self, holds: Callable[[], bool]) -> None:
        pause = 0.0
        while not holds():
            self._check()
            time.sleep(pause)
            pause = min(pause + 1e-5, _LONGEST)
        self._keep_order()

    def _keep_order(self) -> None:
        """Keep memory accesses before and after this in order, on every processor."""
        self._ordered.release()
        self._ordered.acquire()

    def _mark(self, how: int) -> None:
        self._fences.view(np.uint32)[(self.stage * _FENCE + _BROKEN) // 4] = how

    def _check(self) -> None:
        how = int(self._fences.view(np.uint32)[(self.stage * _FENCE + _BROKEN) // 4])
        if how == _STRANGERS:
            raise EngineFault("the ranks of the group are not in one place of one program")
        if how:
            raise EngineFault("another rank of the group is gone")

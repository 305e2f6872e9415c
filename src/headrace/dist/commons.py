"""Memory that the ranks of a group share on one host: a fence, and what they exchange.

A file of the system's memory without a name (`memfd`), handed down by its descriptor: /dev/shm has
64 MB in most containers. Ranks take the same rooms in the same order, so that the n-th room of one
is the n-th room of all; pages have memory once they are written.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

SIZE = 1 << 38
"""Size of the file, which has no more memory than its rooms."""
_BROKEN = 128
"""Where the fence says that a rank is gone (kernels/cpu/csrc/ranks.h)."""


def make_commons() -> int:
    """The descriptor of a new commons; the caller closes it."""
    descriptor = os.memfd_create("headrace ranks")
    os.ftruncate(descriptor, SIZE)
    return descriptor


class Commons:
    """A commons as one rank sees it."""

    def __init__(self, descriptor: int, ranks: int, rank: int) -> None:
        self.ranks, self.rank = ranks, rank
        self._descriptor, self._next = descriptor, 0
        self._fence = self.take(mmap.PAGESIZE)

    def begin_anew(self) -> None:
        """Whoever takes rooms from now on gets those that were taken before, in the same order."""
        self._next = mmap.PAGESIZE

    @property
    def fence(self) -> int:
        """Address of the fence."""
        at: int = self._fence.__array_interface__["data"][0]
        return at

    def take(self, size: int) -> npt.NDArray[Any]:
        """Room for so many bytes, uint8; zeros, unless somebody has written there."""
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        room = mmap.mmap(self._descriptor, whole, offset=self._next)
        self._next += whole
        return np.frombuffer(room, np.uint8)[:size]

    def tear(self) -> None:
        """Say that a rank is gone: whoever waits for it at the fence gives up, now and later."""
        self._fence[_BROKEN : _BROKEN + 4].view(np.uint32)[0] = 1

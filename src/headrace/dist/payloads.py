"""Inputs in sealed shared memory, handed to other processes of this host by a handle.

An input lies in a file of the system's memory without a name (`memfd`), which is sealed: nobody
can change it. Its owner keeps it open; others open it through the owner's descriptors in /proc. It
goes with its last user, so a process that dies leaves nothing behind. A descriptor that was closed
may be used again for something else: the memory begins with a random token that the handle names.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import weakref
from collections import Counter

import numpy as np
import numpy.typing as npt

from ..base.encodings import MOST_INPUTS, SealedHandle
from ..base.errors import EngineFault, Overloaded, TooLarge, UnsupportedModel

MOST_BYTES = 256 << 20
"""Bytes of all inputs that are open."""
MOST_OF_ONE = 128 << 20
"""Bytes of the inputs of one owner."""
_TOKEN = 16
Floats = npt.NDArray[np.float32]


class SealedInput:
    """An input, open until `close` or the end of the last reference to it."""

    def __init__(self, payloads: SealedInputs, owner: str, array: Floats) -> None:
        rows, width = array.shape
        self.size = _TOKEN + array.nbytes
        token = secrets.token_bytes(_TOKEN)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create("headrace input", flags)
        try:
            _write(descriptor, [token, np.ascontiguousarray(array).data.cast("B")])
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        self.source = SealedHandle(os.getpid(), descriptor, token, rows, width)
        self.close = weakref.finalize(self, payloads.left, owner, self.size, descriptor)


class SealedInputs:
    """The inputs that one process has open, with bounds for all and for each owner. For one
    thread."""

    def __init__(
        self,
        most: int = MOST_BYTES,
        most_of_one: int = MOST_OF_ONE,
        most_open: int = MOST_INPUTS,
    ) -> None:
        """`most` and `most_of_one`: bytes; `most_open`: inputs, of which one owner has half."""
        self._most, self._most_of_one, self._most_open = most, most_of_one, most_open
        self.bytes = 0
        self._of: Counter[str] = Counter()
        self._open: Counter[str] = Counter()

    def hold(self, owner: str, array: Floats) -> SealedInput:
        """Put an array [rows, width] into sealed memory. Raises `TooLarge` for more than one owner
        may have, `Overloaded` if there is no room now, `UnsupportedModel` without such memory."""
        if sys.platform != "linux":
            raise UnsupportedModel("inputs that are not text are taken on Linux alone")
        size = _TOKEN + array.nbytes
        if size > self._most_of_one:
            raise TooLarge(f"an input takes {size} bytes; at most {self._most_of_one} are taken")
        if self.bytes + size > self._most or self._of[owner] + size > self._most_of_one:
            raise Overloaded("the inputs of other requests take all the memory", retry_after=1.0)
        files = min(self._most_open, _files() // 8)
        if self._open.total() >= files or self._open[owner] >= max(1, files // 2):
            raise Overloaded("the inputs of other requests take all open files", retry_after=1.0)
        made = SealedInput(self, owner, array)
        self.bytes += size
        self._of[owner] += size
        self._open[owner] += 1
        return made

    def left(self, owner: str, size: int, descriptor: int) -> None:
        """Close an input that nobody has any more."""
        os.close(descriptor)
        self.bytes -= size
        self._of[owner] -= size
        self._open[owner] -= 1
        if not self._open[owner]:
            del self._of[owner], self._open[owner]


def read_payload(source: SealedHandle) -> Floats:
    """Read the array of a handle; raises `EngineFault` if its owner has closed it or is gone."""
    gone = EngineFault("the input is gone: its request has ended")
    try:
        path = f"/proc/{source.process}/fd/{source.descriptor}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        raise gone from None
    try:
        room = np.empty((source.rows, source.width), np.float32)
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:  # It is no such memory.
            raise gone from None
        size = os.fstat(descriptor).st_size
        token = os.pread(descriptor, _TOKEN, 0)
        if not sealed or token != source.token or size != _TOKEN + room.nbytes:
            raise gone
        view, done = room.data.cast("B"), 0
        while done < len(view):
            done += os.preadv(descriptor, [view[done:]], _TOKEN + done)
        return room
    finally:
        os.close(descriptor)


def _files() -> int:
    """Return the number of files that this process may have open."""
    import resource  # Local: Windows has none.

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def _write(descriptor: int, parts: list[bytes | memoryview]) -> None:
    for part in parts:
        view = memoryview(part)
        while view:
            view = view[os.write(descriptor, view) :]


_SEALS = 0
if sys.platform == "linux":
    _SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

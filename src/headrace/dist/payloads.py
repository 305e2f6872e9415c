"""Inputs in sealed shared memory, handed to other processes of this host by a handle.

An input is in an anonymous memory file (`memfd`), sealed against changes. Its owner keeps it open;
others open it through the owner's descriptors in /proc. It is freed with its last user, so a
process that dies leaves nothing behind. A closed descriptor may be reused for something else, so
the memory begins with a random token that the handle repeats.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
import weakref
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.encodings import MOST_INPUTS, SealedHandle
from ..base.errors import EngineFault, Overloaded, TooLarge, UnsupportedModel

MOST_BYTES = 256 << 20
"""Most bytes of all open inputs."""
MOST_OF_ONE = 128 << 20
"""Most bytes of one owner's inputs."""
_TOKEN = 16
_CODES = 256
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
_NO_TABLES: Floats = np.zeros((0, _CODES), np.float32)


class SealedInput:
    """An input, open until `close` or the end of the last reference to it."""

    def __init__(
        self, payloads: SealedInputs, owner: str, array: Floats | Codes, tables: Floats
    ) -> None:
        rows, width = array.shape
        self.size = _TOKEN + tables.nbytes + array.nbytes
        token = secrets.token_bytes(_TOKEN)
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        descriptor = os.memfd_create("headrace input", flags)
        try:
            arrays = (np.ascontiguousarray(each).reshape(-1) for each in (tables, array))
            _write(descriptor, [token, *(each.data.cast("B") for each in arrays if each.size)])
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        self.source = SealedHandle(os.getpid(), descriptor, token, rows, width, tables=len(tables))
        self.close = weakref.finalize(self, payloads.left, owner, self.size, descriptor)

    def part(self, first: int, rows: int) -> SealedHandle:
        """Return the handle of some of its rows."""
        return self.source._replace(first=first, rows=rows, total=self.source.rows)


class SealedInputs:
    """The open inputs of one process, with limits for all and for each owner. For one thread."""

    def __init__(
        self,
        most: int = MOST_BYTES,
        most_of_one: int = MOST_OF_ONE,
        most_open: int = MOST_INPUTS,
    ) -> None:
        """`most` and `most_of_one`: bytes; `most_open`: inputs, half of them for one owner."""
        self._most, self._most_of_one, self._most_open = most, most_of_one, most_open
        self.bytes = 0
        self._of: Counter[str] = Counter()
        self._open: Counter[str] = Counter()

    def hold(self, owner: str, array: Floats | Codes, tables: Floats = _NO_TABLES) -> SealedInput:
        """Put an array [rows, width] into sealed memory, of fp32 numbers or of codes.

        `tables` [n, 256]: numbers of the codes, one table for each n-th of the columns. Raises
        `TooLarge` for more than one owner may have, `Overloaded` if there is no room now,
        `UnsupportedModel` without such memory.
        """
        assert (array.dtype == np.uint8) == bool(len(tables)), "codes have tables"
        if sys.platform != "linux":
            raise UnsupportedModel("inputs that are not text are taken on Linux alone")
        size = _TOKEN + tables.nbytes + array.nbytes
        if size > self._most_of_one:
            raise TooLarge(f"an input takes {size} bytes; at most {self._most_of_one} are taken")
        if self.bytes + size > self._most or self._of[owner] + size > self._most_of_one:
            raise Overloaded("the inputs of other requests take all the memory", retry_after=1.0)
        files = min(self._most_open, _files() // 8)
        if self._open.total() >= files or self._open[owner] >= max(1, files // 2):
            raise Overloaded("the inputs of other requests take all open files", retry_after=1.0)
        made = SealedInput(self, owner, array, tables)
        self.bytes += size
        self._of[owner] += size
        self._open[owner] += 1
        return made

    def left(self, owner: str, size: int, descriptor: int) -> None:
        """Close an input that has no user any more."""
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
        tables = np.empty((source.tables, _CODES), np.float32)
        kind = np.uint8 if source.tables else np.float32
        room = np.empty((source.rows, source.width), kind)
        total, row = source.total or source.rows, source.width * room.itemsize
        at, end = (_TOKEN + tables.nbytes + rows * row for rows in (source.first, total))
        there = 0 <= source.first <= total - source.rows
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:  # It is other memory.
            raise gone from None
        size = os.fstat(descriptor).st_size
        token = os.pread(descriptor, _TOKEN, 0)
        if not sealed or token != source.token or size != end or not there:
            raise gone
        _read(descriptor, tables, _TOKEN)
        _read(descriptor, room, at)
        return _explained(room, tables) if source.tables else room
    finally:
        os.close(descriptor)


def _read(descriptor: int, array: npt.NDArray[Any], at: int) -> None:
    view, done = array.reshape(-1).view(np.uint8).data, 0
    while done < len(view):
        done += os.preadv(descriptor, [view[done:]], at + done)


def _explained(codes: Codes, tables: Floats) -> Floats:
    """Return the numbers of codes [rows, width], whose columns have the tables in turn."""
    found = np.empty(codes.shape, np.float32)
    each = -(-codes.shape[1] // len(tables))
    for at, table in enumerate(tables):
        columns = slice(at * each, (at + 1) * each)
        found[:, columns] = table[codes[:, columns]]
    return found


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

"""The file of repacked weights: named byte ranges, mapped in place, checked on opening.

    0      magic, format, length and SHA-256 of the head; zeros up to 2 MiB
    2 MiB  the payload: weights, each at a multiple of 4 KiB; zeros up to a multiple of 2 MiB
    …      head: JSON {identity, size, entries, sums}

The head comes last, so that weights are written as they are packed and none waits in memory. The
file is hostile. The head is hashed, and every entry is checked against the payload's size.
`PanelFile.check` sums the whole payload, 2 MiB at a time, before a byte of it is used. A torn,
truncated or damaged file is refused. A file forged with matching sums is believed, like everything
else in the user's own cache (ADR 0034). A file gets its final name only after it is complete and on
the disk. Torch-free.

It is mapped shared and read-only, so that all processes that serve a model have one copy in memory.
If it is written in pieces of 2 MiB and more, the page cache of current file systems keeps it in
huge pages; then the mapping is on huge pages too. Otherwise `PanelFile.on_huge_pages` says so and
the caller should copy: reading 4 KiB pages is half as fast.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ModelFileError

if TYPE_CHECKING:
    import numpy.typing as npt

MAGIC = b"HRPANELS"
FORMAT = 2
HUGE = 2 << 20
PAGE = 4096
MAX_HEAD = 64 << 20
STAGE = 32 << 20
"""Bytes written at a time: large pieces become huge pages of the page cache."""
_FIXED = struct.Struct("<8sII32s")
_SENSELESS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors of reading a head that is JSON of another shape: `int(Infinity)`, deep nesting, …"""
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which Python 3.11 does not name."""


class PanelFileWrong(Exception):
    """Reason why a file cannot be used, as half a sentence."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Place of one weight. `offset` counts from the payload's begin."""

    kind: str
    shape: tuple[int, int]
    offset: int
    size: int


class PanelFile:
    """An opened file. Its memory lives as long as any array of it."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Open a file and read its head. Raises `PanelFileWrong`; `OSError` if it is missing or
        unreadable."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            fixed = file.read(_FIXED.size)
            if len(fixed) < _FIXED.size:
                raise PanelFileWrong("it is cut off")
            magic, format_, length, digest = _FIXED.unpack(fixed)
            if magic != MAGIC or format_ != FORMAT:
                raise PanelFileWrong("it is of another format")
            if length > MAX_HEAD or _FIXED.size + length > size:
                raise PanelFileWrong("its head is longer than itself")
            file.seek(size - length)
            raw = file.read(length)
            if hashlib.sha256(raw).digest() != digest:
                raise PanelFileWrong("its head is damaged")
            try:
                self._read_head(json.loads(raw), identity, size - length)
            except _SENSELESS as error:
                raise PanelFileWrong(f"its head makes no sense: {error}") from None
            self._map = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.path = path
        self._own: npt.NDArray[Any] | None = None
        with suppress(OSError, AttributeError):
            # Parts not in memory yet are read in huge pages.
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def _read_head(self, head: Any, identity: Mapping[str, Any], end: int) -> None:
        """Read the head's fields; `end` is where the payload ends."""
        if head["identity"] != identity:
            raise PanelFileWrong("it was made of another file or by another version")
        self.nbytes = int(head["size"])
        if self.nbytes <= 0 or self.nbytes % HUGE or HUGE + self.nbytes != end:
            raise PanelFileWrong("its payload is not where it can be")
        self.entries = {
            str(name): _entry(fields, self.nbytes) for name, fields in head["entries"].items()
        }
        self._sums = [int(each) for each in head["sums"]]
        if len(self._sums) * HUGE != self.nbytes:
            raise PanelFileWrong("its sums are not those of its payload")

    def check(self) -> None:
        """Read the payload once against its sums (and so into memory). Raises `PanelFileWrong`."""
        with suppress(OSError):
            self._map.madvise(_POPULATE_READ)
        if _sums(self._payload()) != self._sums:
            raise PanelFileWrong("its content is damaged")

    @property
    def copied(self) -> bool:
        return self._own is not None

    def on_huge_pages(self) -> bool:
        """Whether most of the (checked) payload is mapped by huge pages; False if unknown."""
        mapped = _of_mapping(self._address(), "FilePmdMapped:")
        return 2 * mapped >= self.nbytes

    def copy_to_huge_pages(self) -> None:
        """Copy the payload to this process's own memory, on huge pages if possible, and stop
        sharing.

        It goes piece by piece, so that it is not in memory twice. Raises `MemoryError` or `OSError`
        if memory is short.
        """
        own, mapped = own_memory(self.nbytes), self._payload()
        for at in range(0, self.nbytes, STAGE):
            size = min(STAGE, self.nbytes - at)
            own[at : at + size] = mapped[at : at + size]
            with suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED, HUGE + at, size)
        self._own = own

    def view(self, name: str) -> npt.NDArray[Any]:
        """Return uint8[size] of an entry, read-only."""
        entry = self.entries[name]
        return self._payload()[entry.offset : entry.offset + entry.size]

    def _payload(self) -> npt.NDArray[Any]:
        import numpy as np  # 90 ms to import: a caller that only needs the head saves them.

        if self._own is not None:
            return self._own
        return np.frombuffer(self._map, np.uint8, self.nbytes, HUGE)

    def _address(self) -> int:
        return int(self._payload().ctypes.data)


def describe(path: Path) -> dict[str, Any] | None:
    """Return the identity in a file's head, of any model and layout; None for any other file."""
    with suppress(OSError, struct.error, *_SENSELESS), path.open("rb") as file:
        magic, format_, length, digest = _FIXED.unpack(file.read(_FIXED.size))
        if magic == MAGIC and format_ == FORMAT and length <= MAX_HEAD:
            file.seek(-length, os.SEEK_END)
            raw = file.read(length)
            if hashlib.sha256(raw).digest() == digest:
                identity = json.loads(raw)["identity"]
                return identity if isinstance(identity, dict) else None
    return None


@dataclass(frozen=True, slots=True)
class Part:
    """One weight to be written. `data` is uint8, contiguous."""

    name: str
    kind: str
    shape: tuple[int, int]
    data: npt.NDArray[Any]


TEMPORARY = ".tmp"


class PanelWriter:
    """Writer of a file, weight by weight, under a temporary name; `finish` renames it.

    It holds one buffer of `STAGE` bytes and nothing else. The caller must hold the lock of the
    path. An unfinished file is removed with this object.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Create the temporary file. Raises `OSError` or `MemoryError`."""
        self._path, self._fresh = path, path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        self._file = os.open(self._fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        weakref.finalize(self, os.close, self._file)
        self._remove = weakref.finalize(self, self._fresh.unlink, missing_ok=True)
        self._identity, self._sums = dict(identity), list[int]()
        self.entries: dict[str, list[Any]] = {}
        self._stage = own_memory(STAGE)
        self._written = self._used = 0
        """Bytes of the payload in the file, and those after them in the stage."""

    def add(self, part: Part) -> None:
        """Add one weight. Raises `OSError` if it has no room, and then adds nothing."""
        at, rest = self._written + self._used, part.data.reshape(-1).view("u1")
        while len(rest):
            if self._used == len(self._stage):
                self._flush()
            taken = min(len(rest), len(self._stage) - self._used)
            self._stage[self._used : self._used + taken] = rest[:taken]
            rest, self._used = rest[taken:], self._used + taken
        self._pad(PAGE)
        self.entries[part.name] = [part.kind, *part.shape, at, part.data.nbytes]

    def finish(self) -> None:
        """Write the rest, flush it to the disk, give the file its name. Raises `OSError`."""
        self._pad(HUGE)
        self._flush()
        head = {"size": self._written, "entries": self.entries, "sums": self._sums}
        raw = json.dumps({"identity": self._identity, **head}).encode()
        self._write(raw, HUGE + self._written)
        self._write(_FIXED.pack(MAGIC, FORMAT, len(raw), hashlib.sha256(raw).digest()), 0)
        os.fsync(self._file)
        self._fresh.replace(self._path)
        self._remove.detach()
        self._stage = self._stage[:0].copy()  # Its memory is freed before the file is mapped.

    def take_back(self) -> dict[str, npt.NDArray[Any]]:
        """Return all added weights, by name, in this process's own memory; remove an unfinished
        file. Raises `MemoryError`, and `ModelFileError` if they cannot be read."""
        own = own_memory(self._written + self._used)
        own[self._written :] = self._stage[: self._used]
        done = 0
        while done < self._written:
            try:
                got = os.preadv(self._file, [own.data[done : self._written]], HUGE + done)
            except OSError:
                got = 0
            if not got:
                raise ModelFileError(
                    f"{self._fresh}: what was written there cannot be read again; "
                    "--no-keep-packed starts without such a file"
                )
            done += got
        self._remove()
        return {name: own[at : at + size] for name, (*_, at, size) in self.entries.items()}

    def _pad(self, unit: int) -> None:
        end = _up(self._used, unit)
        self._stage[self._used : end] = 0
        self._used = end

    def _flush(self) -> None:
        filled = self._stage[: self._used]
        self._write(filled, HUGE + self._written)
        self._sums += _sums(filled)
        self._written, self._used = self._written + self._used, 0

    def _write(self, data: Any, at: int) -> None:
        view = memoryview(data)
        while view:
            done = os.pwrite(self._file, view, at)
            view, at = view[done:], at + done


def write(path: Path, identity: Mapping[str, Any], parts: Sequence[Part]) -> None:
    """Write the file of these weights. Raises `OSError` and then leaves no file. The caller holds
    the lock of the path."""
    writer = PanelWriter(path, identity)
    for part in parts:
        writer.add(part)
    writer.finish()


def own_memory(size: int) -> npt.NDArray[Any]:
    """Allocate uint8[size] of this process, zeroed, on huge pages if possible. Raises `MemoryError`
    or `OSError`."""
    import numpy as np

    room = mmap.mmap(-1, size + HUGE)
    with suppress(OSError, AttributeError):
        room.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(room, np.uint8)
    at = -array.ctypes.data % HUGE
    return array[at : at + size]


def _entry(fields: Any, size: int) -> Entry:
    kind, out, width, offset, length = fields
    entry = Entry(str(kind), (int(out), int(width)), int(offset), int(length))
    if (
        not 0 <= entry.offset <= size
        or not 0 < entry.size <= size - entry.offset
        or entry.offset % PAGE
    ):
        raise PanelFileWrong("an entry lies outside of it")
    return entry


def _sums(payload: npt.NDArray[Any]) -> list[int]:
    """Return the sum, modulo 2^64, of the 64-bit words of each 2 MiB."""
    import numpy as np

    words = payload.view(np.uint64).reshape(-1, HUGE // 8)
    return [int(each) for each in np.add.reduce(words, axis=1)]


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _of_mapping(address: int, field: str) -> int:
    """Return the bytes that Linux reports under a name for the mapping at an address; 0
    elsewhere."""
    inside = False
    with suppress(OSError, ValueError), open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            first, _, rest = line.partition(" ")
            if not first.endswith(":"):
                begin, _, end = first.partition("-")
                inside = int(begin, 16) <= address < int(end, 16)
            elif inside and first == field:
                return int(rest.split()[0]) * 1024
    return 0

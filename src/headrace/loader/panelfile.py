"""The file of repacked weights: named byte ranges that are mapped as they lie, checked on opening.

    0      magic, format, length and SHA-256 of the head
    48     head: JSON {identity, payload, size, entries, sums}
    …      zeros up to a multiple of 2 MiB, where the payload begins
    …      weights, each at a multiple of 4 KiB; zeros up to a multiple of 2 MiB

The file is hostile: the head is hashed, every entry is held against the payload's size, and
`PanelFile.check` sums the whole payload, 2 MiB at a time, before a byte of it is used. A torn,
truncated or rotten file is refused; one that somebody forged with matching sums is believed, like
everything else in the user's own cache (ADR 0033). Nothing carries the final name before it is
complete and on the disk. Torch-free.

It is mapped shared and read-only, so that all processes that serve a model have one copy in
memory. Written in pieces of 2 MiB and more, the page cache of current file systems keeps it in
huge pages, and then the mapping is on huge pages too; where it is not, `PanelFile.on_huge_pages`
says so and the caller had better copy: reading 4 KiB pages is half as fast.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .progress import Progress, Silent

if TYPE_CHECKING:
    import numpy.typing as npt

MAGIC = b"HRPANELS"
FORMAT = 1
HUGE = 2 << 20
PAGE = 4096
MAX_HEAD = 64 << 20
STAGE = 32 << 20
"""Bytes written at a time: large pieces become huge pages of the page cache."""
_FIXED = struct.Struct("<8sII32s")
_SENSELESS = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""What reading a head raises that is JSON of another shape: `int(Infinity)`, a deep nesting, …"""
_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which Python 3.11 does not name."""


class PanelFileWrong(Exception):
    """Why a file cannot be used, as half a sentence."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one weight lies. `offset` counts from the payload's begin."""

    kind: str
    shape: tuple[int, int]
    offset: int
    size: int


class PanelFile:
    """An opened file. Its memory lives as long as any array of it."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Raises `PanelFileWrong`; `OSError` where there is no such file, or no reading it."""
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
            raw = file.read(length)
            if hashlib.sha256(raw).digest() != digest:
                raise PanelFileWrong("its head is damaged")
            try:
                self._read_head(json.loads(raw), identity, _FIXED.size + length, size)
            except _SENSELESS as error:
                raise PanelFileWrong(f"its head makes no sense: {error}") from None
            self._map = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self.path = path
        self._copy: mmap.mmap | None = None
        with suppress(OSError, AttributeError):
            # What is not in memory yet is read in huge pages.
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def _read_head(self, head: Any, identity: Mapping[str, Any], least: int, size: int) -> None:
        """`least`: where the payload may begin; `size` of the file."""
        if head["identity"] != identity:
            raise PanelFileWrong("it was made of another file or by another version")
        self._begin, self.nbytes = int(head["payload"]), int(head["size"])
        if self._begin % HUGE or self.nbytes % HUGE or self._begin < least:
            raise PanelFileWrong("its payload is not where it can be")
        if self.nbytes <= 0 or self._begin + self.nbytes != size:
            raise PanelFileWrong("it is cut off")
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
        return self._copy is not None

    def on_huge_pages(self) -> bool:
        """Is most of the (checked) payload mapped by huge pages? False where nobody says."""
        mapped = _of_mapping(self._address(), "FilePmdMapped:")
        return 2 * mapped >= self.nbytes

    def copy_to_huge_pages(self) -> None:
        """Give up sharing: the payload as this process's own memory, on huge pages if possible.

        Raises `MemoryError` or `OSError` where there is no memory for it.
        """
        import numpy as np

        copy = mmap.mmap(-1, self.nbytes + HUGE)
        with suppress(OSError, AttributeError):
            copy.madvise(mmap.MADV_HUGEPAGE)
        room = np.frombuffer(copy, np.uint8)
        at = -room.ctypes.data % HUGE
        room[at : at + self.nbytes] = self._payload()
        self._own = room[at : at + self.nbytes]
        self._copy = copy
        with suppress(OSError):
            self._map.madvise(mmap.MADV_DONTNEED)

    def view(self, name: str) -> npt.NDArray[Any]:
        """uint8[size] of an entry, read-only."""
        entry = self.entries[name]
        return self._payload()[entry.offset : entry.offset + entry.size]

    def _payload(self) -> npt.NDArray[Any]:
        import numpy as np  # 90 ms to import: who only asks for the head does not pay for it.

        if self._copy is not None:
            return self._own
        return np.frombuffer(self._map, np.uint8, self.nbytes, self._begin)

    def _address(self) -> int:
        return int(self._payload().ctypes.data)


def describe(path: Path) -> dict[str, Any] | None:
    """The identity in a file's head, whoever made it; None where it is no such file."""
    with suppress(OSError, struct.error, *_SENSELESS), path.open("rb") as file:
        magic, format_, length, digest = _FIXED.unpack(file.read(_FIXED.size))
        if magic == MAGIC and format_ == FORMAT and length <= MAX_HEAD:
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


def file_size(parts: Sequence[Part]) -> int:
    """Bytes that `write` will need for them, within some megabytes."""
    return sum(_up(part.data.nbytes, PAGE) for part in parts) + 4 * HUGE


def write(
    path: Path, identity: Mapping[str, Any], parts: Sequence[Part], progress: Progress | None = None
) -> None:
    """Write the file under another name, flush it to the disk, then give it its own.

    Raises `OSError`; then nothing is left behind. The caller holds the lock of the path.
    """

    told = progress or Silent()
    entries: dict[str, list[Any]] = {}
    at = 0
    for part in parts:
        entries[part.name] = [part.kind, *part.shape, at, part.data.nbytes]
        at = _up(at + part.data.nbytes, PAGE)
    size = _up(max(at, 1), HUGE)
    head: dict[str, Any] = {
        "identity": dict(identity),
        "size": size,
        "payload": 0,
        "entries": entries,
        "sums": [],
    }
    # 24 characters for each sum: more than any number of 64 bits takes.
    begin = _up(_FIXED.size + len(json.dumps(head)) + 24 * (size // HUGE) + 64, HUGE)
    fresh = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    told.start(size, f"repacked weights for the next start: {path.name}")
    try:
        with fresh.open("wb", buffering=0) as file:
            file.seek(begin)
            for stage in _stages(parts, size):
                head["sums"] += _sums(stage)
                view = memoryview(stage.data)
                while view:
                    view = view[file.write(view) :]
                told.advance(stage.nbytes)
            head["payload"] = begin
            raw = json.dumps(head).encode()
            assert _FIXED.size + len(raw) <= begin
            file.seek(0)
            file.write(_FIXED.pack(MAGIC, FORMAT, len(raw), hashlib.sha256(raw).digest()) + raw)
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    finally:
        told.done()


TEMPORARY = ".tmp"


def _stages(parts: Sequence[Part], size: int) -> Iterator[npt.NDArray[Any]]:
    """The payload in pieces of `STAGE` bytes (the last may be shorter), through one buffer."""
    import numpy as np

    room = np.zeros(min(STAGE, size), np.uint8)
    used = done = 0
    for part in parts:
        rest = part.data.reshape(-1).view(np.uint8)
        padded = _up(rest.nbytes, PAGE)
        while padded:
            step = min(padded, room.nbytes - used)
            filled = min(step, rest.nbytes)
            room[used : used + filled] = rest[:filled]
            room[used + filled : used + step] = 0
            rest, padded, used = rest[filled:], padded - step, used + step
            if used == room.nbytes:
                yield room
                used, done = 0, done + room.nbytes
    if done < size:
        room[used:] = 0
        yield room[: size - done]


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
    """The sum, modulo 2^64, of the 64-bit words of each 2 MiB."""
    import numpy as np

    words = payload.view(np.uint64).reshape(-1, HUGE // 8)
    return [int(each) for each in np.add.reduce(words, axis=1)]


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _of_mapping(address: int, field: str) -> int:
    """Bytes that Linux reports under a name for the mapping at an address; 0 elsewhere."""
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

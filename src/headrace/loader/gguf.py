"""Reader of GGUF files, versions 2 and 3: metadata, and each tensor's place in a mapping.

The file is hostile: every count, length and offset is bounded and checked against the file's size
before use, and tensors may not overlap. Opening costs a walk over the metadata. Token arrays of
150,000 strings are walked once and decoded only when iterated over. Source of the format: the GGUF
specification (docs/gguf.md of ggml).
"""

from __future__ import annotations

import mmap
import struct
from array import array
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ModelFileError
from ..base.strings import StringArray
from ..base.textlibrary import walk_strings
from ..quant.ggml_types import BY_NUMBER, GgmlType

if TYPE_CHECKING:
    import numpy.typing as npt

MAGIC = b"GGUF"
HEAD = 24
"""Bytes before the metadata: magic, version, number of tensors, number of entries."""
MAX_ENTRIES = 1 << 16
"""Largest number of metadata entries, and of tensors: the largest models have some thousands."""
MAX_KEY = 1 << 16
MAX_STRING = 1 << 26
MAX_ARRAY = 1 << 24
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32

_SCALARS: dict[int, tuple[str, int]] = {
    0: ("B", 1), 1: ("b", 1), 2: ("H", 2), 3: ("h", 2), 4: ("I", 4), 5: ("i", 4), 6: ("f", 4),
    7: ("?", 1), 10: ("Q", 8), 11: ("q", 8), 12: ("d", 8),
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Place of one tensor. `shape` is in numpy's order: the last axis is contiguous."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    """Offset from the start of the file, in bytes."""
    nbytes: int


class GgufFile:
    """An opened file: `metadata` by key, `tensors` by name in file order; `view` maps one.

    The mapping is private (copy on write): views are writable arrays, the file never changes. The
    mapping lives as long as any view of it.
    """

    def __init__(self, path: Path, *, complete: bool = True) -> None:
        """Open and check a file. Without `complete` the tensors may be cut off: the header is
        enough."""
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size < HEAD:
                    raise ModelFileError(f"{path.name}: {size} bytes is too short for a GGUF file")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
        reader = _Reader(self._map, path.name)
        self.version, tensors, entries = reader.head()
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key, value = reader.entry()
            if key in self.metadata:
                raise ModelFileError(f"{path.name}: metadata key {key!r:.80} appears twice")
            self.metadata[key] = value
        self._tables = reader.at
        self.tensors = _tensors(reader, tensors, self._alignment(), complete)
        last = max(self.tensors.values(), key=lambda tensor: tensor.offset, default=None)
        self.complete = last is None or last.offset + last.nbytes <= size
        with suppress(OSError, AttributeError):
            # Vocabularies are megabytes; the needed parts have been copied.
            self._map.madvise(mmap.MADV_DONTNEED, 0, reader.at // mmap.PAGESIZE * mmap.PAGESIZE)

    def view(self, name: str) -> npt.NDArray[Any]:
        """Return the tensor's bytes: uint8 [rows, bytes per row]; F32 and F16 as float arrays
        [shape].

        BF16, which numpy lacks, comes as uint16 [shape].
        """
        # 90 ms to import: a reader of metadata alone (the API process) does not pay for it.
        import numpy as np

        info = self.tensors[name]
        flat = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        plain = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(info.type.name)
        if plain is not None:
            return flat.view(plain).reshape(info.shape)
        return flat.reshape(*info.shape[:-1], info.type.row_bytes(info.shape[-1]))

    def rest(self) -> None:
        """Release the memory of all pages that were read; the next access reads them again. No view
        may have been written to."""
        with suppress(OSError, AttributeError):
            self._map.madvise(mmap.MADV_DONTNEED)

    def entries(self) -> bytes:
        """Return the metadata's bytes unchanged."""
        return self._map[HEAD : self._tables]

    def _alignment(self) -> int:
        value = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 8 <= value <= 1 << 20 or value & (value - 1):
            raise ModelFileError(
                f"{self.path.name}: general.alignment is {value!r:.40}; "
                "must be a power of two from 8 to 1048576"
            )
        return value


class _Reader:
    """A cursor over the mapping; every read is checked against the end."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.size = len(data)
        self.name = name
        self.at = 0

    def head(self) -> tuple[int, int, int]:
        """Return (version, number of tensors, number of metadata entries)."""
        magic = self.data[:4]
        if magic != MAGIC:
            raise ModelFileError(f"{self.name}: not a GGUF file (it starts with {magic!r})")
        version, tensors, entries = struct.unpack_from("<IQQ", self.data, 4)
        if version & 0xFFFF == 0:
            raise ModelFileError(f"{self.name}: big-endian GGUF files are not read")
        if version not in (2, 3):
            raise ModelFileError(f"{self.name}: GGUF version {version}; supported: 2 and 3")
        self.at = HEAD
        self._bound("number of tensors", tensors, MAX_ENTRIES)
        self._bound("number of metadata entries", entries, MAX_ENTRIES)
        return version, tensors, entries

    def entry(self) -> tuple[str, Any]:
        key = self.string("metadata key", MAX_KEY)
        return key, self.value(key, self.u32(f"type of {key}"))

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string(key, MAX_STRING)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise ModelFileError(f"{self.name}: {key} has unknown type {kind}")
        code, width = _SCALARS[kind]
        (value,) = struct.unpack_from("<" + code, self.data, self._take(key, width))
        return value

    def array(self, key: str) -> Any:
        """Read a list of numbers, or a `StringArray`."""
        kind, count = self.u32(f"item type of {key}"), self.u64(f"length of {key}")
        self._bound(f"length of {key}", count, MAX_ARRAY)
        if kind == _STRING:
            return self.strings(key, count)
        if kind not in _SCALARS:
            raise ModelFileError(
                f"{self.name}: {key} is an array of type {kind}; numbers and strings are read"
            )
        code, width = _SCALARS[kind]
        start = self._take(key, count * width)
        return list(struct.unpack_from(f"<{count}{code}", self.data, start))

    def strings(self, key: str, count: int) -> StringArray:
        data, at, end = self.data, self.at, self.size
        self._bound(f"length of {key}", count, (end - at) // 8)
        walked = walk_strings(data, at, end, count)
        if walked is not None:
            self.at, starts = walked
            if self.at < 0:
                raise ModelFileError(f"{self.name}: ends inside {key}")
            return StringArray(data[at : self.at], starts, key)
        begin, starts = at, array("Q", [0])  # A list of them would take five times as much memory.
        length_at = _U64.unpack_from
        try:
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
                starts.append(at - begin)
        except (struct.error, OverflowError):
            at = end + 1
        if at > end:
            raise ModelFileError(f"{self.name}: ends inside {key}")
        self.at = at
        return StringArray(data[begin:at], starts, key)

    def string(self, what: str, limit: int) -> str:
        length = self.u64(f"length of {what}")
        self._bound(f"length of {what}", length, limit)
        start = self._take(what, length)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self.name}: {what} is not UTF-8: {error}") from None

    def u32(self, what: str) -> int:
        start = self._take(what, 4)
        return int.from_bytes(self.data[start : start + 4], "little")

    def u64(self, what: str) -> int:
        start = self._take(what, 8)
        return int.from_bytes(self.data[start : start + 8], "little")

    def _take(self, what: str, length: int) -> int:
        start = self.at
        if start + length > self.size:
            raise ModelFileError(f"{self.name}: ends inside {what:.80}")
        self.at = start + length
        return start

    def _bound(self, what: str, value: int, limit: int) -> None:
        if value > limit:
            raise ModelFileError(f"{self.name}: {what:.80} is {value}; at most {limit}")


def _tensors(reader: _Reader, count: int, alignment: int, complete: bool) -> dict[str, TensorInfo]:
    """Read the table of tensors; check that each is inside the file (if `complete`) and none
    overlap."""
    heads = [_tensor_head(reader) for _ in range(count)]
    base = (reader.at + alignment - 1) // alignment * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in heads:
        values = 1
        for size in shape:
            values *= size
        nbytes = values // kind.block * kind.nbytes
        if offset % alignment:
            raise ModelFileError(
                f"{reader.name}: tensor {name:.80} starts at {offset}, which is not a multiple "
                f"of the alignment {alignment}"
            )
        if complete and base + offset + nbytes > reader.size:
            raise ModelFileError(
                f"{reader.name}: tensor {name:.80} ends at byte {base + offset + nbytes}, the "
                f"file at {reader.size}: the file is truncated or its header is wrong"
            )
        if name in tensors:
            raise ModelFileError(f"{reader.name}: tensor {name:.80} appears twice")
        tensors[name] = TensorInfo(name, kind, shape, base + offset, nbytes)
    by_offset = sorted(tensors.values(), key=lambda info: info.offset)
    for before, after in pairwise(by_offset):
        if before.offset + before.nbytes > after.offset:
            raise ModelFileError(
                f"{reader.name}: tensors {before.name:.80} and {after.name:.80} overlap"
            )
    return {info.name: info for info in by_offset}


def _tensor_head(reader: _Reader) -> tuple[str, tuple[int, ...], GgmlType, int]:
    name = reader.string("tensor name", MAX_KEY)
    what = f"tensor {name:.80}"
    dimensions = reader.u32(f"dimensions of {what}")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ModelFileError(f"{reader.name}: {what} has {dimensions} dimensions; 1 to 4 are read")
    shape = tuple(reader.u64(f"shape of {what}") for _ in range(dimensions))[::-1]
    if not all(1 <= size <= 1 << 40 for size in shape):
        raise ModelFileError(f"{reader.name}: {what} has shape {shape}")
    number = reader.u32(f"type of {what}")
    kind = BY_NUMBER.get(number)
    if kind is None:
        raise ModelFileError(f"{reader.name}: {what} has unknown type {number}")
    if shape[-1] % kind.block:
        raise ModelFileError(
            f"{reader.name}: rows of {what} hold {shape[-1]} values, which is not a multiple of "
            f"{kind.name}'s block of {kind.block}"
        )
    return name, shape, kind, reader.u64(f"offset of {what}")

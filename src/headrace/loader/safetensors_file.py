"""Safetensors as host arrays: bounded, checked, without torch, read or mapped.

The format (github.com/huggingface/safetensors, "Format"): eight bytes with the length of a JSON
header, the header, then the tensors' bytes. The header must follow the format: ranges without gaps
from the first byte to the file's last, sizes that match type and shape, no name twice.

Tensors are read when they are asked for, into memory of their own; a file truncated meanwhile is an
error. Dense matrices for the CPU kernels are views of the file's mapping, as those of a GGUF are.
So a table costs only the rows that are read, and weights kept in panels cost nothing. Truncating a
mapped file ends the process.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ..base.errors import ModelFileError

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_HEADER = 100_000_000
"""Largest header in bytes: the format's own limit."""
_MAX_DIMENSIONS = 16
SIZES = {
    "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "BOOL": 1, "I32": 4, "I64": 8,
}  # fmt: skip
"""Type, as the format names it → bytes of a number. Others are not read."""
_HOST = {
    "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "I8": "i1", "U8": "u1",
    "BOOL": "u1", "I32": "<i4", "I64": "<i8",
}  # fmt: skip
"""Type → numpy's type; BF16 and F8_E4M3, which numpy lacks, as their bits."""
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of dense weights → their names elsewhere (`kernels.arrays.dtype_name`)."""
_COMPARED = 4 << 20
"""Bytes of two tensors that are compared at once."""
_AT_ONCE = 1 << 30
"""Bytes of one read: the system returns no more than 2 GiB at a time."""


class OpenFile:
    """A file that stays open as long as this object lives; all of its tensors hold it."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.handle)

    @functools.cached_property
    def mapping(self) -> mmap.mmap:
        """Map all of the file, privately: views may be written, the file never changes. Raises
        `OSError` or `ValueError`."""
        return mmap.mmap(self.handle, 0, access=mmap.ACCESS_COPY)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Header of one tensor, and access to its values."""

    shard: Path
    dtype: str
    """Type in the format's own name."""
    shape: tuple[int, ...]
    begin: int
    """Offset of its bytes in the file."""
    file: OpenFile

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]

    @property
    def host_dtype(self) -> str:
        """Return the type as `kernels.arrays.dtype_name` names it; a quantised one by its own
        name."""
        return _NAMES.get(self.dtype, self.dtype)

    def rows(self, stack: int, first: int, shape: tuple[int, ...]) -> StoredTensor:
        """Return rows from `first` on of one matrix of a stack; a tensor of this `shape` is
        returned whole."""
        if shape == self.shape:
            return self
        before = (stack * self.shape[1] + first) * self.shape[2] * SIZES[self.dtype]
        return replace(self, shape=shape, begin=self.begin + before)

    def part(self, index: int) -> StoredTensor:
        """Return the part at `index` along the first dimension."""
        one = replace(self, shape=self.shape[1:])
        return replace(one, begin=self.begin + index * one.nbytes)

    def read(self) -> npt.NDArray[Any]:
        """Read the tensor [shape]; raises `ModelFileError` if its bytes are gone."""
        # 90 ms to import: a reader of headers alone (the API process) does not pay for it.
        import numpy as np

        room = np.empty(self.shape, _HOST[self.dtype])
        self._fill(memoryview(room.reshape(-1).view("u1").data))
        return room

    def equals(self, other: StoredTensor) -> bool:
        """Compare the bytes of two tensors. Raises `ModelFileError` if a file has become
        shorter."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        for at in range(0, self.nbytes, _COMPARED):
            size = min(_COMPARED, self.nbytes - at)
            if self._bytes(at, size) != other._bytes(at, size):
                return False
        return True

    def _bytes(self, at: int, size: int) -> bytearray:
        """Read some of its bytes."""
        found = bytearray(size)
        self._fill(memoryview(found), at)
        return found

    def mapped(self) -> npt.NDArray[Any]:
        """Return the tensor [shape] as a view of the file's mapping, which lives as long as any
        view.

        Reads it instead if it cannot be mapped or is misaligned. Raises `ModelFileError`.
        """
        import numpy as np  # Local, as in `read`.

        dtype = np.dtype(_HOST[self.dtype])
        try:
            whole = self.file.mapping
        except (OSError, ValueError):
            return self.read()
        if self.begin % dtype.itemsize or len(whole) < self.begin + self.nbytes:
            return self.read()
        count = math.prod(self.shape)
        return np.frombuffer(whole, dtype, count, self.begin).reshape(self.shape)

    def _fill(self, room: memoryview, at: int = 0) -> None:
        """Read its bytes from `at` on into all of `room`."""
        done = 0
        while done < len(room):
            part = room[done : done + _AT_ONCE]
            try:
                got = os.preadv(self.file.handle, [part], self.begin + at + done)
            except OSError as error:
                raise ModelFileError(
                    f"{self.shard.name}: cannot be read: {error.strerror}"
                ) from None
            if not got:
                raise ModelFileError(
                    f"{self.shard.name}: ends {len(room) - done} bytes before the end of a "
                    "tensor: it was truncated while it was read"
                )
            done += got


def stored_under(paths: Iterable[Path], *prefixes: str) -> dict[str, StoredTensor]:
    """Return the tensors of several files whose names have a prefix. Raises `ModelFileError`."""
    return {
        name: stored
        for path in paths
        for name, stored in read_header(path).items()
        if name.startswith(prefixes)
    }


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return name → tensor, in the order of the file's bytes. Raises `ModelFileError`."""
    try:
        file = OpenFile(path)
        size = os.fstat(file.handle).st_size
        length = int.from_bytes(_exactly(file, 8, path), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise ModelFileError(
                f"{path.name}: not a sound safetensors file: a header of {length} bytes in {size}"
            )
        text = _exactly(file, length, path)
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            f"{path.name}: not a sound safetensors file: its header: {error}"
        ) from None
    if not isinstance(header, dict):
        raise ModelFileError(
            f"{path.name}: not a sound safetensors file: its header is no JSON object"
        )
    header.pop("__metadata__", None)
    begin = 8 + length
    tensors = {name: _tensor(name, entry, path, begin, file) for name, entry in header.items()}
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].nbytes)))
    end = begin
    for name, tensor in ordered.items():
        if tensor.begin != end:
            raise _unsound(path, name, f"begins at byte {tensor.begin - begin}, not {end - begin}")
        end += tensor.nbytes
    if end != size:
        raise ModelFileError(
            f"{path.name}: not a sound safetensors file: its tensors end at byte {end} of {size}"
        )
    return ordered


def _exactly(file: OpenFile, length: int, path: Path) -> bytes:
    found = bytearray()
    while len(found) < length:
        part = os.read(file.handle, length - len(found))
        if not part:
            raise ModelFileError(
                f"{path.name}: not a sound safetensors file: it ends in its header"
            )
        found += part
    return bytes(found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _unsound(path: Path, name: str, why: str) -> ModelFileError:
    return ModelFileError(f"{path.name}: not a sound safetensors file: tensor {name!r:.100} {why}")


def _tensor(name: str, entry: object, path: Path, begin: int, file: OpenFile) -> StoredTensor:
    """Check one entry of the header. Raises `ModelFileError`."""
    if not isinstance(entry, Mapping):
        raise _unsound(path, name, "is no JSON object")
    dtype, shape, range_ = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if dtype not in SIZES:
        raise ModelFileError(
            f"{path.name}: tensor {name!r:.100} is {dtype!r:.40}; read are {', '.join(SIZES)}"
        )
    if not _naturals(shape) or len(shape) > _MAX_DIMENSIONS:
        raise _unsound(path, name, f"has the shape {shape!r:.100}")
    if not _naturals(range_) or len(range_) != 2:
        raise _unsound(path, name, f"has the data_offsets {range_!r:.100}")
    tensor = StoredTensor(path, str(dtype), tuple(shape), begin + range_[0], file)
    if range_[1] - range_[0] != tensor.nbytes:
        raise _unsound(
            path,
            name,
            f"has {range_[1] - range_[0]} bytes; {dtype} of shape {list(shape)!r:.100} has "
            f"{tensor.nbytes}",
        )
    return tensor


def _naturals(value: Any) -> TypeGuard[list[int]]:
    """Return whether this is a list of whole numbers from 0 to a sane limit."""
    return isinstance(value, list) and all(
        type(each) is int and 0 <= each < 1 << 48 for each in value
    )

"""Memory that a confined child shares with its parent: a head in MessagePack, then arrays.

One region holds the inputs of one run, and then its outputs. What the child wrote is checked as
bytes of a stranger: it has run a foreign file.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from math import prod

import msgspec
import numpy as np

from ..base.errors import InvalidRequest, ModelFileError
from ..base.foreign import msgpack_reader
from .rows import KINDS, NAMES, Array, Feed

HEAD = 1 << 20
"""Bytes for the head."""
KEPT = 16 << 20
"""Bytes of arrays above which a region gives its memory back after a run."""
ALIGNED = 64


class SharedTensor(msgspec.Struct, array_like=True):
    name: str
    type: str
    shape: list[int]
    at: int


class RunHead(msgspec.Struct, array_like=True):
    """Head of a run: the order, or with `error` and `end` its result."""

    tensors: list[SharedTensor]
    end: int = 0
    """First free byte behind the arrays."""
    seed: int = 0
    seconds: float = 0.0
    error: list[str] | None = None
    """Class, message, parameter and code of an error."""
    processor_ns: int = 0
    """Nanoseconds of the processor that the run took."""


_head = msgpack_reader(RunHead)


def unnamed_file(*parts: bytes) -> int:
    """Return a new file in memory, or where there is none such on disk, at its beginning."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("headrace-program", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    try:
        with os.fdopen(os.dup(file), "wb") as whole:
            for part in parts:
                whole.write(part)
        os.lseek(file, 0, os.SEEK_SET)
    except BaseException:
        os.close(file)
        raise
    return file


class Region:
    """One mapping; its file is inherited by the child."""

    def __init__(self, file: int, size: int) -> None:
        self.file, self.size = file, size
        self._map = mmap.mmap(file, size)
        self._bytes = np.frombuffer(self._map, np.uint8)

    @classmethod
    def make(cls, size: int) -> Region:
        """Make a region of at most `size` bytes of arrays; memory is taken as it is written."""
        file = unnamed_file()
        try:
            os.ftruncate(file, HEAD + size)
            return cls(file, HEAD + size)
        except BaseException:
            os.close(file)
            raise

    def put(self, arrays: Feed, head: RunHead, start: int = HEAD) -> int:
        """Write arrays behind `start`, and the head; return the head's length. Raises
        `InvalidRequest`."""
        at = start
        for name, value in arrays.items():
            at = -(-at // ALIGNED) * ALIGNED
            if value.nbytes > self.size - at:
                held = f"{self.size - HEAD:,} bytes of a run's inputs and outputs"
                why = f"{name:.80} has {value.nbytes:,} bytes; there is room for {held}"
                raise InvalidRequest(f"it cannot run on these inputs: {why}", param="inputs")
            head.tensors.append(SharedTensor(name, NAMES[value.dtype], list(value.shape), at))
            room = self._bytes[at : at + value.nbytes].view(value.dtype)
            room[:] = value.reshape(-1)
            at += value.nbytes
        head.end = at
        told = msgspec.msgpack.encode(head)
        if len(told) > HEAD:
            why = f"the names and shapes of a run have {len(told):,} bytes"
            raise InvalidRequest(f"it cannot run on these inputs: {why}", param="inputs")
        self._map[: len(told)] = told
        return len(told)

    def get(self, length: int) -> tuple[RunHead, dict[str, Array]]:
        """Read the head and views of its arrays. Raises `ModelFileError` for a head that lies."""
        try:
            if not 0 < length <= HEAD:
                raise ValueError
            head = _head(self._map[:length])
            found = [self._view(one) for one in head.tensors]
            # Views of the same bytes would be copied to more than the region holds.
            if sum(one.nbytes for one in found) > self.size - HEAD:
                raise ValueError
            return head, {one.name: view for one, view in zip(head.tensors, found, strict=True)}
        except (ValueError, TypeError, OverflowError):
            raise ModelFileError("the process of a program answers what no program does") from None

    def _view(self, told: SharedTensor) -> Array:
        kind = KINDS.get(told.type)
        if kind is None or min(told.shape, default=0) < 0:
            raise ValueError
        size = prod(told.shape) * kind.itemsize
        if not HEAD <= told.at <= self.size - size:
            raise ValueError
        return self._bytes[told.at : told.at + size].view(kind).reshape(told.shape)

    def clear(self, end: int) -> None:
        """Give memory back after a run whose arrays end at `end`, if that is much."""
        if end > HEAD + KEPT and hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE, HEAD, self.size - HEAD)

    def close(self) -> None:
        """Close the file; the mapping goes with its last view."""
        os.close(self.file)


def copied(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Copy arrays out of a region."""
    return {name: value.copy() for name, value in arrays.items()}

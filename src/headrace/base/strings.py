"""Many strings in one buffer: those of a vocabulary, without an object for each."""

from __future__ import annotations

import itertools
import struct
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import overload

from .errors import ModelFileError

_U64 = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """Strings in one buffer, in the format of GGUF files, decoded on access.

    `starts[i]` is the offset of string i's length word in `buffer`; the last entry is the end of
    the last string. `text.native` reads both without conversion. Compares equal to any sequence of
    the same strings; pickles and copies as a list.
    """

    def __init__(self, buffer: bytes, starts: array[int], name: str) -> None:
        self.buffer = buffer
        self.starts = starts
        self._name = name

    @classmethod
    def of(cls, values: Sequence[str], name: str) -> StringArray:
        """Hold these strings, called `name` in errors. Raises `UnicodeEncodeError`."""
        parts = [value.encode() for value in values]
        ends = itertools.accumulate((len(part) + _U64.size for part in parts), initial=0)
        buffer = b"".join(_U64.pack(len(part)) + part for part in parts)
        return cls(buffer, array("Q", ends), name)

    def first(self, count: int) -> StringArray:
        """Return the first `count` of them, in the same memory."""
        return StringArray(self.buffer, self.starts[: count + 1], self._name)

    @property
    def arguments(self) -> tuple[bytes, int, int]:
        """Buffer, address of the starts, number of strings: for a library in C."""
        return self.buffer, self.starts.buffer_info()[0], len(self)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._text(self.starts[index], self.starts[index + 1])

    def __iter__(self) -> Iterator[str]:
        buffer, starts = self.buffer, self.starts
        try:
            for i in range(len(starts) - 1):
                yield buffer[starts[i] + 8 : starts[i + 1]].decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._name} is not UTF-8: {error}") from None

    def find(self, text: str) -> int | None:
        """Return the index of the first string equal to `text`, without decoding the others."""
        stored = text.encode()
        pattern = _U64.pack(len(stored)) + stored
        at = self.buffer.find(pattern)
        while at >= 0:
            index = bisect_left(self.starts, at)
            # The pattern may also lie across two strings: only a string's start counts.
            if index < len(self) and self.starts[index] == at:
                return index
            at = self.buffer.find(pattern, at + 1)
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type[list[str]], tuple[list[str]]]:
        return list, (list(self),)

    def _text(self, start: int, end: int) -> str:
        try:
            return self.buffer[start + 8 : end].decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self._name} is not UTF-8: {error}") from None

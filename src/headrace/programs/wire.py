"""Bounded reading and writing of protobuf messages, without a schema and without copies.

A file that nobody vouches for is walked here before a library sees it. The number of fields is
bounded. What libraries read differently is refused: groups, numbers of more than ten bytes, a
value of another wire type than its field, a message that occurs twice where one is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..base.errors import ModelFileError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
Value = int | bytes | memoryview
"""A varint, the four or eight bytes of a fixed number, or a view of a byte string."""


class Walk:
    """The allowance of one file: fields that may still be read."""

    def __init__(self, fields: int) -> None:
        self.left = self.most = fields

    def spend(self) -> None:
        """Count a field. Raises `ModelFileError` after the last allowed one."""
        self.left -= 1
        if self.left < 0:
            raise ModelFileError(f"the file has more than {self.most:,} protobuf fields")


def spans(view: memoryview, walk: Walk) -> Iterator[tuple[int, Value, int, int]]:
    """Yield (number, value, start, end) of each field."""
    at, size = 0, len(view)
    while at < size:
        walk.spend()
        start = at
        key, at = _varint(view, at)
        number, kind = key >> 3, key & 7
        if not 1 <= number < 1 << 29:
            raise ModelFileError(f"protobuf: field number {number} at byte {start}")
        if kind == VARINT:
            value, at = _varint(view, at)
            yield number, value, start, at
            continue
        if kind == BYTES:
            length, at = _varint(view, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise ModelFileError(f"protobuf: wire type {kind} at byte {start}; allowed: 0, 1, 2, 5")
        if length > size - at:
            raise ModelFileError(
                f"protobuf: a field of {length:,} bytes at byte {start}, {size - at:,} are there"
            )
        held = view[at : at + length]
        yield number, held if kind == BYTES else bytes(held), start, at + length
        at += length


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(at, min(at + 10, len(view))):
        byte = view[place]
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, place + 1
        shift += 7
    raise ModelFileError(f"protobuf: a number without an end at byte {at}")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class WireFields:
    """A message: its values by field number, in order. `what` names a field in errors."""

    def __init__(self, view: memoryview, walk: Walk) -> None:
        self.walk = walk
        self.fields: dict[int, list[Value]] = {}
        for number, value, _, _ in spans(view, walk):
            self.fields.setdefault(number, []).append(value)

    def bytes(self, at: int, what: str) -> list[memoryview]:
        """Return the byte strings of a repeated field."""
        values = self.fields.get(at, [])
        if not all(isinstance(value, memoryview) for value in values):
            raise ModelFileError(f"{what} is a number where bytes are due")
        return values  # type: ignore[return-value]

    def all(self, at: int, what: str) -> list[WireFields]:
        """Return the messages of a repeated field."""
        return [WireFields(one, self.walk) for one in self.bytes(at, what)]

    def one(self, at: int, what: str) -> WireFields | None:
        """Return the only message of a field. Libraries would merge a second one."""
        if len(self.fields.get(at, ())) > 1:
            raise ModelFileError(f"{what} occurs {len(self.fields[at])} times, allowed is once")
        return next(iter(self.all(at, what)), None)

    def texts(self, at: int, what: str) -> list[str]:
        try:
            return [str(value, "utf-8") for value in self.bytes(at, what)]
        except UnicodeDecodeError:
            raise ModelFileError(f"{what} is not UTF-8") from None

    def text(self, at: int, what: str) -> str:
        """Return the last text of a field, or an empty one."""
        return (self.texts(at, what) or [""])[-1]

    def number(self, at: int, what: str) -> int:
        """Return the last number of a field, signed, or 0."""
        value = self.fields.get(at, [0])[-1]
        if not isinstance(value, int):
            raise ModelFileError(f"{what} is bytes where a number is due")
        return _signed(value)

    def numbers(self, at: int) -> list[int]:
        """Return signed numbers of a repeated field, packed or one by one."""
        found: list[int] = []
        for value in self.fields.get(at, ()):
            place = 0
            if isinstance(value, bytes):
                raise ModelFileError("a fixed number where a variable one is due")
            while not isinstance(value, int) and place < len(value):
                self.walk.spend()
                one, place = _varint(value, place)
                found.append(_signed(one))
            found += [_signed(value)] if isinstance(value, int) else []
        return found


def encoded(fields: Iterable[tuple[int, int | bytes]]) -> bytes:
    """Write a message of (number, value) pairs: integers as varints, bytes with their length."""
    out = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            out += _number(number << 3 | VARINT) + _number(value & (1 << 64) - 1)
        else:
            out += _number(number << 3 | BYTES) + _number(len(value)) + value
    return bytes(out)


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])

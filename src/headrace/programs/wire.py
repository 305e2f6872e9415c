"""Bounded reading and writing of protobuf messages, without a schema and without copies.

A file that nobody vouches for is walked here before a library sees it. The number of fields and
the depth of messages are bounded. What libraries read differently is refused: groups, varints
longer than ten bytes, a message that occurs twice where one is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..base.errors import ModelFileError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_SIGN = 1 << 63
Value = int | memoryview
Fields = dict[int, list[Value]]


class Walk:
    """The allowance of one file: fields that may still be read."""

    def __init__(self, fields: int, depth: int) -> None:
        self.left = fields
        self.depth = depth
        self._most = fields

    def spend(self) -> None:
        """Count a field. Raises `ModelFileError` after the last allowed one."""
        self.left -= 1
        if self.left < 0:
            raise ModelFileError(f"the file has more than {self._most:,} protobuf fields")

    def within(self, depth: int, what: str) -> None:
        """Raise `ModelFileError` if messages are nested deeper than allowed."""
        if depth > self.depth:
            raise ModelFileError(f"{what} is nested more than {self.depth} deep")


def spans(view: memoryview, walk: Walk) -> Iterator[tuple[int, int, Value, int, int]]:
    """Yield (number, wire type, value, start, end) of each field; fixed values as bytes."""
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
            yield number, kind, value, start, at
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
        yield number, kind, view[at : at + length], start, at + length
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


def fields_of(view: memoryview, walk: Walk) -> Fields:
    """Return the values of a message by field number, in order."""
    found: Fields = {}
    for number, _, value, _, _ in spans(view, walk):
        found.setdefault(number, []).append(value)
    return found


def message(fields: Fields, number: int, what: str) -> memoryview | None:
    """Return the only message in a field. Libraries would merge a second one."""
    values = fields.get(number, ())
    if len(values) > 1:
        raise ModelFileError(f"{what} occurs {len(values)} times, at most once is allowed")
    return messages(fields, number, what)[0] if values else None


def messages(fields: Fields, number: int, what: str) -> list[memoryview]:
    """Return the messages or byte strings of a repeated field."""
    values = fields.get(number, [])
    if any(isinstance(value, int) for value in values):
        raise ModelFileError(f"{what} is a number where bytes are due")
    return values  # type: ignore[return-value]


def text(fields: Fields, number: int, what: str) -> str:
    """Return a text: the last one, or empty."""
    return (texts(fields, number, what) or [""])[-1]


def texts(fields: Fields, number: int, what: str) -> list[str]:
    """Return the texts of a repeated field."""
    try:
        return [str(value, "utf-8") for value in messages(fields, number, what)]
    except UnicodeDecodeError:
        raise ModelFileError(f"{what} is not UTF-8") from None


def number(fields: Fields, at: int, what: str, default: int = 0) -> int:
    """Return a signed number: the last one."""
    values = fields.get(at)
    if not values:
        return default
    value = values[-1]
    if not isinstance(value, int):
        raise ModelFileError(f"{what} is bytes where a number is due")
    return value - (1 << 64) if value & _SIGN else value


def numbers(fields: Fields, at: int, walk: Walk) -> list[int]:
    """Return signed numbers of a repeated field, packed or one by one."""
    found: list[int] = []
    for value in fields.get(at, ()):
        if isinstance(value, int):
            found.append(value)
            continue
        place = 0
        while place < len(value):
            walk.spend()
            one, place = _varint(value, place)
            found.append(one)
    return [value - (1 << 64) if value & _SIGN else value for value in found]


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
    out.append(value)
    return bytes(out)

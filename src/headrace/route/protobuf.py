"""The wire format of protocol buffers, as far as a few small messages need it.

Written by hand: the messages of the endpoint picker have some twenty fields, and what a compiler
makes of their files imports a hundred others (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

from ..base.errors import HeadraceError

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5


class MalformedMessage(HeadraceError):
    """Bytes that are no message, or a field of another type than asked for."""

    status = 400
    code = "malformed_message"


class Message:
    """A message's fields by their numbers; what a message lacks is 0, empty or a message of
    nothing."""

    def __init__(self, data: bytes | memoryview) -> None:
        """Raises `MalformedMessage`. What lies inside is read when it is asked for."""
        self._fields: dict[int, list[int | memoryview]] = {}
        view, place = memoryview(data), 0
        while place < len(view):
            tag, place = _varint(view, place)
            kind = tag & 7
            value: int | memoryview
            if kind == _VARINT:
                value, place = _varint(view, place)
            else:
                size = {_FIXED64: 8, _FIXED32: 4}.get(kind, -1)
                if kind == _SIZED:
                    size, place = _varint(view, place)
                if size < 0 or place + size > len(view):
                    raise MalformedMessage("the message is cut or of a kind that is not used")
                value = view[place : place + size]
                place += size
            self._fields.setdefault(tag >> 3, []).append(value)

    def has(self, number: int) -> bool:
        return number in self._fields

    def number(self, number: int) -> int:
        """A number, a bool or a member of an enum; given twice, the last counts."""
        value = self._fields.get(number, [0])[-1]
        if not isinstance(value, int):
            raise MalformedMessage(f"field {number} must be a number")
        return value

    def all(self, number: int) -> list[memoryview]:
        """Everything that a field was given."""
        values = self._fields.get(number, [])
        sized = [value for value in values if isinstance(value, memoryview)]
        if len(sized) < len(values):
            raise MalformedMessage(f"field {number} must be bytes, a text or a message")
        return sized

    def bytes(self, number: int) -> bytes:
        return bytes((self.all(number) or [memoryview(b"")])[-1])

    def text(self, number: int) -> str:
        return self.bytes(number).decode(errors="replace")

    def message(self, number: int) -> Message:
        return Message(self.bytes(number))

    def messages(self, number: int) -> list[Message]:
        return [Message(value) for value in self.all(number)]

    def entry(self, key: str) -> Message | None:
        """A value of the map that is field 1, as that of a Struct and of Metadata is."""
        for one in self.messages(1):
            if one.text(1) == key:
                return one.message(2)
        return None


def _varint(view: memoryview, place: int) -> tuple[int, int]:
    """(number, place behind it)"""
    value = 0
    for shift in range(0, 70, 7):
        if place == len(view):
            break
        byte = view[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (1 << 64) - 1, place
    raise MalformedMessage("a number of the message does not end")


def field(number: int, value: int | bytes | str) -> bytes:
    """One field: a number that is not negative, or what has a size (bytes, a text, a message)."""
    if isinstance(value, int):
        return _number(number << 3 | _VARINT) + _number(value)
    data = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | _SIZED) + _number(len(data)) + data


def _number(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)

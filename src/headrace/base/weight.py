"""The parse cost of a JSON text, estimated before it is parsed.

A parser turns two bytes (`[]`) into an object of sixty, and holds the GIL meanwhile. So the
cost of foreign text is estimated first, from its objects and lists, other values, and numbers in
lists. These cost least: prompts come as token ids. The estimate itself works in pieces, between
which other threads run, and builds nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import TooLarge

PIECE = 32 * 1024
LIGHT = 16 * 1024
"""Bytes of a text that needs no estimate: parsing it, and its conversion for the engine, take only
some milliseconds."""
_OF_NUMBERS = b"0123456789+-.eE \t\r\n"
_RUNS = re.compile(rb",,+")


@dataclass(frozen=True, slots=True)
class Weight:
    """Counts of a JSON text, or upper bounds."""

    containers: int
    """Objects and lists."""
    values: int
    """Other values between commas, and the keys of objects."""
    numbers: int
    """Numbers that follow a number in a list."""

    def verify(self, most: Weight, what: str, param: str | None = None) -> None:
        """Raise `TooLarge` if one of the counts exceeds that of `most`."""
        for name, words in (
            ("containers", "objects and lists"),
            ("values", "values"),
            ("numbers", "numbers"),
        ):
            count, limit = getattr(self, name), getattr(most, name)
            if count > limit:
                raise TooLarge(f"{what} has more than {limit} {words}", param=param)


def weigh(text: bytes | bytearray) -> Weight:
    """Estimate the cost of parsing a JSON text; any number for invalid JSON."""
    rough = Weight(*_counted(text))
    if rough.containers + rough.values < 4096:
        return rough  # Includes commas inside strings: an upper bound.
    return _exact(text)


def _counted(text: bytes | bytearray) -> tuple[int, int, int]:
    containers = values = 0
    for start in range(0, len(text), PIECE):
        end = start + PIECE
        containers += text.count(b"{", start, end) + text.count(b"[", start, end)
        values += text.count(b",", start, end)
    return containers, values + containers, 0


def _exact(text: bytes | bytearray) -> Weight:
    containers = values = numbers = 0
    inside = escaped = False  # inside a string; by the last byte of the preceding piece
    for start in range(0, len(text), PIECE):
        piece = bytes(text[start : start + PIECE])
        if escaped:
            piece = b"x" + piece[1:]
        stripped = piece.rstrip(b"\\")
        escaped = (len(piece) - len(stripped)) % 2 == 1
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        # Every second part lies outside of strings; one quote remains for each string.
        parts = piece.split(b'"')
        outside = b'"'.join(parts[1 if inside else 0 :: 2])
        inside ^= len(parts) % 2 == 0
        bare = outside.translate(None, _OF_NUMBERS)
        opened = bare.count(b"{") + bare.count(b"[")
        commas = bare.count(b",")
        followed = len(bare) - len(_RUNS.sub(b",", bare))
        containers += opened
        numbers += followed
        values += commas - followed + opened
    return Weight(containers, values, numbers)

"""Samples that a session holds: 16 bits at 16 kHz, whatever format they arrived in."""

from __future__ import annotations

import secrets
import time
from typing import BinaryIO

from .agreed import Agreed
from .pcm import floats

PIECE = 1 << 16
"""Bytes converted to fp32 at once."""


class SpokenTurn:
    """Speech from one pause to the next, and the words already sent of it."""

    def __init__(self, first: int, place: int) -> None:
        self.id = f"item_{secrets.token_hex(12)}"
        self.first = first
        """Index of its first sample in the session."""
        self.place = place
        self.data = bytearray()
        """Samples, 16 bits each."""
        self.heard = 0
        """Number of samples that the latest pass was given."""
        self.begun = time.monotonic()
        self.agreed = Agreed()

    @property
    def count(self) -> int:
        return len(self.data) // 2


def write_floats(file: BinaryIO, data: bytes | bytearray) -> None:
    """Write 16-bit samples as fp32, piece by piece."""
    view = memoryview(data)
    for at in range(0, len(view), PIECE):
        file.write(floats(view[at : at + PIECE]).tobytes())

"""Interface for a download's progress; the command line draws the bar."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO


class Progress(Protocol):
    """Listener for one file, or one computation, after the other: start, advance …, done."""

    def start(self, total: int, label: str, *, share: bool = False) -> None:
        """Begin a file of `total` bytes; the user reads `label` (the file's name, or a wait).
        `share`: it is a computation of `total` parts, shown in per cent."""
        ...

    def advance(self, n: int) -> None:
        """Count n more bytes; negative if some had to be thrown away."""
        ...

    def done(self) -> None:
        """End: the file is complete, or was given up (an error follows)."""
        ...


class Silent:
    """A `Progress` that shows nothing."""

    def start(self, total: int, label: str, *, share: bool = False) -> None: ...

    def advance(self, n: int) -> None: ...

    def done(self) -> None: ...


class TerminalLine:
    """A `Progress` as one line of a terminal, for processes without the command line's bars.

    It shows nothing if the stream is not a terminal, or if the work is short.
    """

    PATIENCE = 0.5
    """Seconds of work before the first output."""
    INTERVAL = 0.1

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = False
        self._total = self._count = 0
        self._label = ""
        self._next = 0.0

    def start(self, total: int, label: str, *, share: bool = False) -> None:
        self._total, self._label, self._count = total, label, 0
        self._next = time.monotonic() + self.PATIENCE

    def advance(self, n: int) -> None:
        self._count += n
        now = time.monotonic()
        if now >= self._next and self._stream.isatty():
            self._next = now + self.INTERVAL
            share = f" {min(100, 100 * self._count // self._total):3d} %" if self._total else ""
            self._write(f"\r{self._label}{share}\x1b[K")
            self._shown = True

    def done(self) -> None:
        if self._shown:
            self._write("\r\x1b[K")
            self._shown = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

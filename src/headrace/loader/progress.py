"""How a download says where it is; the command line draws the bar."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO


class Progress(Protocol):
    """Told of one file after the other: start, advance …, done."""

    def start(self, total: int, label: str) -> None:
        """`total` bytes in all; `label` is what the user reads (the file's name, or a wait)."""
        ...

    def advance(self, n: int) -> None:
        """n more bytes; negative where some had to be thrown away."""
        ...

    def done(self) -> None:
        """The file is complete, or was given up (an error follows)."""
        ...


class Silent:
    """A `Progress` that nobody watches."""

    def start(self, total: int, label: str) -> None: ...

    def advance(self, n: int) -> None: ...

    def done(self) -> None: ...


class TerminalLine:
    """A `Progress` as one line of a terminal, for processes without the command line's bars.

    Silent where the stream is no terminal, and for what is done in a moment.
    """

    PATIENCE = 0.5
    """Seconds of work before the first word."""
    INTERVAL = 0.1

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = False
        self._total = self._count = 0
        self._label = ""
        self._next = 0.0

    def start(self, total: int, label: str) -> None:
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

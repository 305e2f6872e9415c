"""Progress of downloads and computations, and its line on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

from ..base.errors import DownloadError


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


class ProgressLine:
    """A `Progress` as one changing line of a terminal; elsewhere a line every ten seconds and at
    each end.

    A context: a download that still runs in a thread at its exit ends with `DownloadError`.
    """

    PATIENCE = 0.5
    """Seconds of work before a terminal's first output."""
    INTERVALS = (10.0, 0.1)
    """Seconds between two outputs, and on a terminal."""

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._enabled, self._live = enabled, self._stream.isatty()
        self._label, self._total, self._count, self._share = "", 0, 0, False
        self._begun = self._next = 0.0
        self._shown = self._closed = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *exception: object) -> None:
        self._closed = True
        self._clear()

    def start(self, total: int, label: str, *, share: bool = False) -> None:
        self._label, self._total, self._count, self._share = label, total, 0, share
        self._begun = time.monotonic()
        if self._live:
            self._next = self._begun + self.PATIENCE

    def advance(self, n: int) -> None:
        if self._closed:
            raise DownloadError("the download was stopped; it will be resumed")
        self._count += n
        now = time.monotonic()
        if self._enabled and now >= self._next:
            self._next = now + self.INTERVALS[self._live]
            self._write(f"\r{self._text(now)}\x1b[K" if self._live else f"{self._text(now)}\n")
            self._shown = self._live

    def done(self) -> None:
        self._clear()
        if self._enabled and not self._live and self._total:
            self._write(f"{self._text(time.monotonic())}\n")

    def _text(self, now: float) -> str:
        if not self._total:
            return self._label
        if self._share:
            return f"{self._label}: {min(100, 100 * self._count // self._total)} %"
        text = f"{self._label}: {self._count / 2**20:.0f} of {self._total / 2**20:.0f} MiB"
        if not self._live or self._count <= 0:
            return text
        rate = self._count / max(now - self._begun, 1e-3)
        left = max(self._total - self._count, 0) / rate
        return f"{text}, {rate / 2**20:.0f} MiB a second, {left:.0f} s left"

    def _clear(self) -> None:
        if self._shown:
            self._write("\r\x1b[K")
            self._shown = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

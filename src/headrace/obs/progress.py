"""Displays on standard error: what a computation is at, and how many prompts are done."""

from __future__ import annotations

import sys
import time
from typing import TextIO

QUIET_SECONDS = 2.0
"""Seconds of a computation without a terminal before its first line."""


class StatusLine:
    """Display of what a computation is at: one changing line on a terminal, else a line for each
    part that takes long. Call it with the part."""

    def __init__(self, stream: TextIO, what: str) -> None:
        self._stream, self._what = stream, what
        self._live = stream.isatty()
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> StatusLine:
        return self

    def __call__(self, part: str) -> None:
        now = time.monotonic()
        if self._live:
            self._stream.write(f"\r\x1b[K{self._what}: {part} …")
        elif now - self._last >= QUIET_SECONDS:
            self._stream.write(f"{self._what}: {part}, after {now - self._begin:.0f} s\n")
            self._last = now
        self._stream.flush()

    def __exit__(self, *what: object) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class TokenProgress:
    """Requests done and tokens, as a context; silent if not enabled."""

    def __init__(self, requests: int, *, enabled: bool) -> None:
        self._requests, self._enabled = requests, enabled
        self._tokens = self._done = 0
        self._begun = self._next = time.monotonic()

    def __enter__(self) -> TokenProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._show(end="\n")

    def tokens(self, count: int) -> None:
        self._tokens += count
        self._show()

    def done(self) -> None:
        self._done += 1
        self._show()

    def _show(self, end: str = "") -> None:
        if not self._enabled:
            return
        now, live = time.monotonic(), sys.stderr.isatty()
        if end or (live and now >= self._next):
            self._next = now + 0.1
            text = f"{self._done} of {self._requests} requests, {self._tokens:,} tokens"
            sys.stderr.write("\r\x1b[K" * live + f"{text}, {now - self._begun:.0f} s{end}")
            sys.stderr.flush()

"""Progress on stderr: download bars and what a computation is at."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from ..base.errors import DownloadError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_SECONDS = 10.0
"""Seconds between two lines without a terminal."""


class DownloadBars:
    """Display of the loader's `Progress`; nothing is printed while nothing is in work.

    A context: a download that still runs in a thread at its exit ends with `DownloadError`.
    """

    def __init__(self, stream: TextIO, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._stream = stream
        self._live = enabled and stream.isatty()
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._done = 0
        self._label = ""
        self._last = 0.0
        self._share = False
        self._closed = False

    def __enter__(self) -> DownloadBars:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def start(self, total: int, label: str, *, share: bool = False) -> None:
        self._total, self._label, self._done = total, label, 0
        if not self._live:
            self._share = share
            return
        if self._progress is not None and share != self._share:
            self._progress.stop()
            self._progress = None
        self._share = share
        if self._progress is None:
            # Local: 40 ms of imports, of no use to a start whose files are here.
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            sizes = [TaskProgressColumn()] if share else [DownloadColumn(), TransferSpeedColumn()]
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                *sizes,
                TimeRemainingColumn(),
                console=Console(file=self._stream, markup=False),
            )
            self._progress.start()
        self._task = self._progress.add_task(label, total=total or None)

    def advance(self, n: int) -> None:
        if self._closed:
            raise DownloadError("the download was stopped; it will be resumed")
        self._done += n
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self._done)
        elif self._enabled and time.monotonic() - self._last >= LINE_SECONDS:
            self._last = time.monotonic()
            self._line()

    def done(self) -> None:
        if self._enabled and not self._live and self._total:
            self._line()

    def _line(self) -> None:
        size = ""
        if self._total and self._share:
            size = f": {100 * self._done / self._total:.0f} %"
        elif self._total:
            size = f": {self._done / 2**20:.0f} of {self._total / 2**20:.0f} MiB"
        self._stream.write(f"{self._label}{size}\n")
        self._stream.flush()


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

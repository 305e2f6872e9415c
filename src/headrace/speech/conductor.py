"""Many walks over one network: each turn encodes a slice of one window and steps all others.

A walk that asks to be decoded gets its logits in the step of all who ask; who asks for a window to
be encoded waits in a line, of which the first is served one layer a turn. So a sound of three
seconds beside one of three hours waits for slices, not for hours, and nobody's answer depends on
who else is there: rows of the kernels do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from .decoding import Copy, Decode, Encode
from .features import log_mel
from .network import MAX_LOGITS, MAX_ROWS, Network

Result = TypeVar("Result")
_NOTHING = np.empty((0, 0), np.float32)


class WalkUnderWay(Generic[Result]):
    """One walk and its end."""

    def __init__(self, walk: Generator[Any, Any, Result]) -> None:
        self.walk = walk
        self.wish: Any = None
        self.result: Result | None = None
        self.error: Exception | None = None
        self.done = False


class Conductor:
    """Runs walks until none is left; not safe for threads."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._jobs: list[WalkUnderWay[Any]] = []
        self._line: deque[WalkUnderWay[Any]] = deque()
        self._slices: Iterator[None] | None = None
        self.free_windows = list(range(network.windows))[::-1]
        self.free_sequences = list(range(network.sequences))[::-1]

    @property
    def idle(self) -> bool:
        return not self._jobs

    def add(self, job: WalkUnderWay[Any]) -> None:
        """Run it up to its first wish."""
        self._jobs.append(job)
        self._send(job, _NOTHING)

    def drop(self, job: WalkUnderWay[Any]) -> None:
        """End a walk whose result nobody wants any more."""
        if job.done:
            return
        if self._line and self._line[0] is job:
            self._slices = None
        if job in self._line:
            self._line.remove(job)
        job.walk.close()
        self._end(job)

    def turn(self) -> None:
        """One slice of one window, and one step for all who ask for one."""
        if self._line:
            self._encode()
        rows = logits = 0
        taken: list[WalkUnderWay[Any]] = []
        for job in self._jobs:
            if not isinstance(job.wish, Decode):
                continue
            more = sum(len(chunk.tokens) for chunk in job.wish.chunks)
            wanted = sum(len(chunk.wanted) for chunk in job.wish.chunks)
            if taken and (rows + more > MAX_ROWS or logits + wanted > MAX_LOGITS):
                break
            rows, logits = rows + more, logits + wanted
            taken.append(job)
        if not taken:
            return
        # Whoever was taken stands behind the others the next time.
        self._jobs = [job for job in self._jobs if job not in taken] + taken
        found = self.network.decode([chunk for job in taken for chunk in job.wish.chunks])
        parts, first = [], 0
        for job in taken:
            count = sum(len(chunk.wanted) for chunk in job.wish.chunks)
            parts.append(found[first : first + count])
            first += count
        for job, part in zip(taken, parts, strict=True):
            self._send(job, part)

    def _encode(self) -> None:
        job = self._line[0]
        if self._slices is None:
            mel = log_mel(job.wish.samples, self.network.files.mels)
            self._slices = self.network.encode(
                mel, job.wish.window, len(job.wish.samples) if job.wish.short else None
            )
        if next(self._slices, self) is self:
            self._slices = None
            self._line.popleft()
            self._send(job, _NOTHING)

    def _send(self, job: WalkUnderWay[Any], what: Any) -> None:
        try:
            job.wish = next(job.walk) if job.wish is None else job.walk.send(what)
            while isinstance(job.wish, Copy):
                self.network.copy(*job.wish)
                job.wish = job.walk.send(_NOTHING)
        except StopIteration as end:
            job.result = end.value
            self._end(job)
        except Exception as error:  # noqa: BLE001 - one walk's fault is not the others'
            job.error = error
            self._end(job)
        else:
            if isinstance(job.wish, Encode):
                self._line.append(job)

    def _end(self, job: WalkUnderWay[Any]) -> None:
        job.done = True
        self._jobs.remove(job)

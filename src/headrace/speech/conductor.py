"""Scheduler of many jobs (walks) over one network. A turn is a slice of one window's encoding, or a
decoding step for all jobs that decode.

Service is shared by time. Each sound has a share that counts the network's time for its jobs; the
sound with the least comes next. The first second that a sound costs counts a quarter, so a sound of
three seconds passes one of three hours that is still running.

Encoding stops after each layer, where another window's encoding may go on. So no job waits for more
than a slice. A step serves all decoding jobs, not only the next one: batched rows cost little more
than one. A job's result does not depend on other jobs, since kernel rows are independent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from .decoding import Copy, Decode, Encode
from .network import MAX_LOGITS, MAX_ROWS

Result = TypeVar("Result")
_NOTHING = np.empty((0, 0), np.float32)
YOUNG_SECONDS, YOUNG_WEIGHT = 1.0, 0.25
"""Seconds of service at a sound's start, and the weight with which they count."""
LEAD = 0.1
"""Seconds by which encoding may run ahead of decoding: steps are cheaper when more decode."""
RESERVED = 2
"""Windows that a sound which holds one already leaves to others."""


class Share:
    """One sound's use of the network, in seconds and in counted seconds."""

    def __init__(self) -> None:
        self.seconds = self.counted = 0.0
        self.windows = 0
        """Number of windows that its jobs hold."""

    @property
    def young(self) -> bool:
        return self.seconds < YOUNG_SECONDS

    def charge(self, seconds: float) -> None:
        self.counted += seconds * (YOUNG_WEIGHT if self.young else 1.0)
        self.seconds += seconds


class WalkUnderWay(Generic[Result]):
    """One walk and its end."""

    def __init__(self, walk: Generator[Any, Any, Result], share: Share | None = None) -> None:
        self.walk = walk
        self.share = share or Share()
        self.slices: Iterator[None] | None = None
        """Remaining slices of its window's encoding, while it is encoded."""
        self.wish: Any = None
        self.result: Result | None = None
        self.error: Exception | None = None
        self.done = False


class Conductor:
    """Scheduler that runs walks until none is left; not thread-safe."""

    def __init__(self, network: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start without jobs. `network`: a `Network`, or one that only encodes windows and never
        decodes in steps."""
        self.network = network
        self._clock = clock
        self._jobs: list[WalkUnderWay[Any]] = []
        self._least = 0.0
        """Minimum service of the active sounds; a new one starts here."""
        self.free_windows = list(range(network.windows))[::-1]
        self.free_sequences = list(range(network.sequences))[::-1]

    @property
    def idle(self) -> bool:
        return not self._jobs

    def add(self, job: WalkUnderWay[Any]) -> None:
        """Add a job and run it up to its first wish."""
        # A sound saves no time for later while it wants none.
        job.share.counted = max(job.share.counted, self._least)
        self._jobs.append(job)
        self._send(job, _NOTHING)

    def drop(self, job: WalkUnderWay[Any]) -> None:
        """End a walk whose result is no longer wanted."""
        if job.done:
            return
        job.walk.close()
        self._end(job)

    def lend(self, share: Share, count: int) -> tuple[int, list[int]] | None:
        """Lend a window and `count` sequences, or None if too few are free or must stay for
        others."""
        others = share.windows > 0
        if len(self.free_windows) <= RESERVED * others or (
            len(self.free_sequences) < count * (1 + others)
        ):
            return None
        share.windows += 1
        return self.free_windows.pop(), [self.free_sequences.pop() for _ in range(count)]

    def take_back(self, share: Share, window: int, sequences: list[int]) -> None:
        share.windows -= 1
        self.free_windows.append(window)
        self.free_sequences.extend(sequences)

    def turn(self) -> None:
        """Run one slice of one window, or one step for all jobs that ask for one."""
        if not self._jobs:
            return
        jobs = sorted(self._jobs, key=lambda job: job.share.counted)
        self._least = jobs[0].share.counted
        encoding = next((job for job in jobs if isinstance(job.wish, Encode)), None)
        decoding = [job for job in jobs if isinstance(job.wish, Decode)]
        begin = self._clock()
        if encoding is not None and not (decoding and _first(decoding[0].share, encoding.share)):
            self._encode(encoding)
            encoding.share.charge(self._clock() - begin)
            return
        taken = self._step(decoding)
        each = (self._clock() - begin) / len(taken)
        for job in taken:
            job.share.charge(each)

    def _step(self, jobs: list[WalkUnderWay[Any]]) -> list[WalkUnderWay[Any]]:
        """Decode for as many walks as fit, the least served first; return them."""
        rows = logits = 0
        taken: list[WalkUnderWay[Any]] = []
        for job in jobs:
            more = sum(len(chunk.tokens) for chunk in job.wish.chunks)
            wanted = sum(len(chunk.wanted) for chunk in job.wish.chunks)
            if taken and (rows + more > MAX_ROWS or logits + wanted > MAX_LOGITS):
                break
            rows, logits = rows + more, logits + wanted
            taken.append(job)
        # Chunks of one window must be adjacent: its K and V are read once for them.
        taken.sort(key=lambda job: int(job.wish.chunks[0].window))
        found = self.network.decode([chunk for job in taken for chunk in job.wish.chunks])
        parts, first = [], 0
        for job in taken:
            count = sum(len(chunk.wanted) for chunk in job.wish.chunks)
            parts.append(found[first : first + count])
            first += count
        for job, part in zip(taken, parts, strict=True):
            self._send(job, part)
        return taken

    def _encode(self, job: WalkUnderWay[Any]) -> None:
        if job.slices is None:
            job.slices = self.network.hear(*job.wish)
        if next(job.slices, self) is self:
            job.slices = None
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
        except Exception as error:  # noqa: BLE001 - one walk's error leaves the others alone
            job.error = error
            self._end(job)

    def _end(self, job: WalkUnderWay[Any]) -> None:
        job.done = True
        self._jobs.remove(job)


def _first(decoding: Share, encoding: Share) -> bool:
    """Tell whether a step is due before a slice. A young sound's text does not wait for old ones'
    windows."""
    lead = 0.0 if decoding.young and not encoding.young else LEAD
    return decoding.counted + lead < encoding.counted

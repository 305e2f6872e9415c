"""Scheduler of many jobs (walks) over a network that transcribes windows in slices.

The network's time is shared fairly. Each sound has a share that counts the network's time for its
jobs; the sound with the least is served next. A sound's first second of service counts a quarter,
so a sound of three seconds overtakes a running one of three hours. A window pauses after each
layer, where another may continue. So no job waits for more than a slice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ..base.request import SequenceDelta

Floats = npt.NDArray[np.float32]
Result = TypeVar("Result")
YOUNG_SECONDS, YOUNG_WEIGHT = 1.0, 0.25
"""Seconds of service at a sound's start, and the weight with which they count."""
RESERVED = 2
"""Free windows that a sound which holds one already must leave to others."""


class Encode(NamedTuple):
    """Request to transcribe samples into a window's slot."""

    samples: Floats
    window: int


class FrameNetwork(Protocol):
    """A network that transcribes windows."""

    windows: int

    def hear(self, samples: Floats, window: int) -> Iterator[None]:
        """Transcribe samples into a window's slot; stop after each layer."""
        ...


class Share:
    """One sound's use of the network, in seconds and in weighted seconds."""

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

    def __init__(self, walk: Generator[Any, Any, Result], share: Any) -> None:
        """`share`: what `Jobs.share` returned for its sound."""
        self.walk, self.share = walk, share
        self.result: Result | None = None
        self.error: Exception | None = None
        self.done = False


class Jobs(Protocol):
    """Runner of jobs, which yield requests and are sent the results."""

    def share(self) -> Any:
        """Return the share of a new sound, to count its use."""
        ...

    def lend(self, share: Any) -> int | None:
        """Lend a window, or return None if too few are free or must stay for others."""
        ...

    def take_back(self, share: Any, window: int) -> None: ...

    def add(self, job: WalkUnderWay[Any]) -> None:
        """Add a job and run it up to its first request."""
        ...

    def drop(self, job: WalkUnderWay[Any]) -> None:
        """End a job whose result is no longer wanted."""
        ...

    def turn(self) -> None:
        """Compute a part of the jobs' requests."""
        ...

    def take(self, deltas: list[SequenceDelta]) -> None:
        """Give jobs a step's results for their requests."""
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class Conductor:
    """Scheduler of jobs; not thread-safe."""

    def __init__(
        self, network: FrameNetwork, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start without jobs."""
        self.network = network
        self._clock = clock
        self._jobs: list[WalkUnderWay[Any]] = []
        self._wishes: dict[WalkUnderWay[Any], tuple[Encode, Iterator[None]]] = {}
        """By job: its request, and the remaining slices of its window."""
        self._least = 0.0
        """Minimum service of the active sounds; a new one starts here."""
        self.free_windows = list(range(network.windows))[::-1]

    @property
    def idle(self) -> bool:
        return not self._jobs

    def share(self) -> Share:
        return Share()

    def add(self, job: WalkUnderWay[Any]) -> None:
        # A sound cannot save up service while it needs none.
        job.share.counted = max(job.share.counted, self._least)
        self._jobs.append(job)
        self._go_on(job)

    def drop(self, job: WalkUnderWay[Any]) -> None:
        if job.done:
            return
        job.walk.close()
        self._end(job)

    def lend(self, share: Share) -> int | None:
        if len(self.free_windows) <= RESERVED * (share.windows > 0):
            return None
        share.windows += 1
        return self.free_windows.pop()

    def take_back(self, share: Share, window: int) -> None:
        share.windows -= 1
        self.free_windows.append(window)

    def turn(self) -> None:
        """Run one slice of one window."""
        if not self._jobs:
            return
        job = min(self._jobs, key=lambda job: job.share.counted)
        self._least = job.share.counted
        begin = self._clock()
        try:
            over = next(self._wishes[job][1], self) is self
        except Exception as error:  # noqa: BLE001 - of this window; its slot holds no answer
            job.error = error
            job.walk.close()
            self._end(job)
        else:
            if over:
                self._go_on(job)
        job.share.charge(self._clock() - begin)

    def take(self, deltas: list[SequenceDelta]) -> None:
        """Do nothing: its jobs make no requests."""

    def close(self) -> None:
        """Do nothing: nothing outlives the network."""

    def _go_on(self, job: WalkUnderWay[Any]) -> None:
        try:
            wish = next(job.walk)
            self._wishes[job] = wish, self.network.hear(*wish)
        except StopIteration as end:
            job.result = end.value
            self._end(job)
        except Exception as error:  # noqa: BLE001 - one walk's error leaves the others alone
            job.error = error
            self._end(job)

    def _end(self, job: WalkUnderWay[Any]) -> None:
        job.done = True
        self._jobs.remove(job)
        self._wishes.pop(job, None)

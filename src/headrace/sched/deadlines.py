"""Order and admission of work with deadlines, for every kind of work; it has no clock and no I/O.

Classes come in order: real time, interactive, batch. Within a class the earliest deadline is first
(Liu and Layland 1973). Nothing that runs is interrupted, so whatever runs may hold up real time
once, for as long as it takes: the blocking term of the admission test (Baker 1991). Work runs on
lanes, one piece on each at a time. A periodic stream keeps to the lane that admitted it, so the
test for one processor holds for each lane.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from headrace.base.errors import Overloaded

from .queue import PATIENCE_SECONDS

REALTIME, INTERACTIVE, BATCH = range(3)
CLASSES = {"realtime": REALTIME, "interactive": INTERACTIVE, "batch": BATCH}
"""Classes by the name that clients use, the most urgent first."""
MOST_UTILISATION = 0.8
"""Share of a lane that streams may take; the rest is for runs that take longer than measured."""


@dataclass(eq=False, slots=True)
class TimedWork:
    """Work that waits for a lane. Times are seconds of the caller's clock."""

    order: int
    """Number by arrival."""
    arrival: float
    urgency: int = INTERACTIVE
    """Class: a value of `CLASSES`."""
    deadline: float = math.inf
    """When it must have ended."""
    seconds: float | None = None
    """Expected length of its run; None: not known."""
    lane: int | None = None
    """Lane of its stream; None: any."""
    release: float = -math.inf
    """When it gets real time, if it came early; until then it has another class."""
    rest: float = 0.0
    """Expected seconds of the work after it that has the same deadline."""

    @property
    def rank(self) -> tuple[int, float, int]:
        """Place in the queue, the smallest first. Work without a deadline ages as if it had one."""
        due = self.deadline if self.deadline < math.inf else self.arrival + PATIENCE_SECONDS
        return self.urgency, due, self.order

    @property
    def latest(self) -> float:
        """Last moment at which it can start, and the work after it end in time."""
        return self.deadline - (self.seconds or 0.0) - self.rest


@dataclass(frozen=True, slots=True)
class PeriodicStream:
    """Periodic work: a run of at most `seconds` in each `period`, ended `deadline` after release.

    All in seconds. A deadline beyond the period is taken as the period.
    """

    seconds: float
    period: float
    deadline: float

    @property
    def due(self) -> float:
        return min(self.deadline, self.period)

    @property
    def utilisation(self) -> float:
        return self.seconds / self.period


def blocking_allowed(streams: Sequence[PeriodicStream]) -> float:
    """Return the longest run of other work beside which all these streams are in time; below 0:
    they are not in time even alone.

    Baker 1991, with a whole run as the critical section: for the streams 1 to k by deadline,
    Σ seconds / deadline + blocking / deadline of k ≤ 1. A stream of a later deadline blocks too.
    """
    ordered = sorted(streams, key=lambda one: one.due)
    allowed, density = math.inf, 0.0
    for place, stream in enumerate(ordered):
        density += stream.seconds / stream.due
        room = stream.due * (1.0 - density)
        later = max((one.seconds for one in ordered[place + 1 :]), default=0.0)
        allowed = min(allowed, room if later <= room else room - later)
    return allowed


class AdmittedStream:
    """A stream that has a lane."""

    __slots__ = ("_next", "lane", "stream")

    def __init__(self, stream: PeriodicStream, lane: int) -> None:
        self.stream, self.lane = stream, lane
        self._next = -math.inf

    def released(self, now: float) -> tuple[float, float]:
        """Return release and deadline of a run that comes now. One that comes before its period is
        over is released then, so that a sender in a hurry delays nobody."""
        release = max(now, self._next)
        self._next = release + self.stream.period
        return release, release + self.stream.due


class Lanes:
    """Streams by lane, and what other work may run beside them."""

    def __init__(self, count: int, most: float = MOST_UTILISATION) -> None:
        """`most`: utilisation of a lane up to which streams are admitted."""
        self.count, self._most = count, most
        self._streams: list[list[PeriodicStream]] = [[] for _ in range(count)]
        self.allowed = [math.inf] * count
        """Longest run of other work on each lane."""

    def utilisation(self, lane: int) -> float:
        return sum(one.utilisation for one in self._streams[lane])

    def admit(self, stream: PeriodicStream, blocking: float) -> AdmittedStream:
        """Take a stream on the first lane where it, and all streams there, stay in time beside runs
        of `blocking` seconds. Raises `Overloaded`, and then nothing is taken."""
        reasons = []
        for lane, streams in enumerate(self._streams):
            total = self.utilisation(lane) + stream.utilisation
            allowed = blocking_allowed([*streams, stream])
            if total <= self._most and blocking <= allowed:
                streams.append(stream)
                self.allowed[lane] = allowed
                return AdmittedStream(stream, lane)
            if total > self._most:
                reasons.append(f"lane {lane} would be used to {total:.0%} of {self._most:.0%}")
            else:
                beside = f"runs of {blocking * 1e3:.1f} ms, of {max(0.0, allowed) * 1e3:.1f}"
                reasons.append(f"lane {lane} would be in time beside {beside} at most")
        run = f"{stream.seconds * 1e3:.1f} ms each {stream.period * 1e3:.1f} ms"
        why = "; ".join(reasons[:4])
        raise Overloaded(f"a stream of {run} is not admitted: {why}", code="not_schedulable")

    def leave(self, admitted: AdmittedStream) -> None:
        streams = self._streams[admitted.lane]
        streams.remove(admitted.stream)
        self.allowed[admitted.lane] = blocking_allowed(streams)

    def room(self, work: TimedWork, lane: int) -> float:
        """Return the seconds that work may run on a lane; 0: it may not start there.

        Work of unknown length goes where no stream is, else where it is allowed the most.
        """
        if work.lane not in (None, lane):
            return 0.0
        if work.urgency == REALTIME:
            return math.inf
        allowed = self.allowed[lane]
        if work.seconds is None and work.lane is None:
            return allowed if allowed == max(self.allowed) else 0.0
        return allowed if work.seconds is not None and work.seconds <= allowed else 0.0


class DeadlineQueue:
    """Waiting work of all classes, by rank."""

    def __init__(self) -> None:
        self._ranked: list[tuple[tuple[int, float, int], TimedWork]] = []
        self._latest: list[tuple[float, int, TimedWork]] = []
        """Heap of work with a deadline, also of some that waits no more."""
        self._early: list[tuple[float, int, TimedWork]] = []
        """Heap of work that came before its release, also of some that waits no more."""
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._ranked)

    def __contains__(self, work: TimedWork) -> bool:
        return work.order in self._live

    def push(self, work: TimedWork) -> None:
        assert work.order not in self._live, f"{work} waits already"
        self._live.add(work.order)
        insort(self._ranked, (work.rank, work))
        if work.latest < math.inf:
            heappush(self._latest, (work.latest, work.order, work))
        if work.release > -math.inf:
            heappush(self._early, (work.release, work.order, work))

    def ripen(self, now: float) -> None:
        """Give real time to work whose release has come."""
        while self._early and self._early[0][0] <= now:
            work = heappop(self._early)[2]
            if self.discard(work):
                work.urgency, work.release = REALTIME, -math.inf
                self.push(work)

    def discard(self, work: TimedWork) -> bool:
        """Take out work wherever it stands; return False if it does not wait."""
        if work.order not in self._live:
            return False
        self._live.remove(work.order)
        del self._ranked[bisect_left(self._ranked, (work.rank,))]
        if len(self._latest) > 2 * len(self._live) + 64:
            self._latest = [one for one in self._latest if one[1] in self._live]
            heapify(self._latest)
        return True

    def waiting(self) -> list[TimedWork]:
        """Return all work, the first to be served first."""
        return [work for _, work in self._ranked]

    def hopeless(self, now: float) -> list[TimedWork]:
        """Take out and return work that can no longer end in time."""
        found = []
        while self.next_latest() < now:
            work = heappop(self._latest)[2]
            self.discard(work)
            found.append(work)
        return found

    def next_release(self) -> float:
        """Return the next moment at which some work gets real time."""
        return self._early[0][0] if self._early else math.inf

    def next_latest(self) -> float:
        """Return the first moment after which some work can no longer end in time."""
        heap = self._latest
        while heap and heap[0][1] not in self._live:
            heappop(heap)
        return heap[0][0] if heap else math.inf

    def take(
        self, lane: int, lanes: Lanes, ready: Callable[[TimedWork], bool] = lambda work: True
    ) -> tuple[TimedWork, float] | None:
        """Take the first work that may start on a lane, and the seconds that it may run there."""
        for _, work in self._ranked:
            room = lanes.room(work, lane)
            if room > 0.0 and ready(work):
                self.discard(work)
                return work, room
        return None

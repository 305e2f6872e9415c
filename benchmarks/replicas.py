"""Replicas by demand over what one carries at the SLO, tried on the simulator.

The rule, Kubernetes' way of following a rule, and the rule that asks the queue instead, on the same
simulated engines: what a change of it does to violated minutes and to replica-hours is seen before
a cluster is. The manifests are in `deploy/autoscaling`.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from headrace.engine.sim import Cluster
from headrace.engine.sim_replica import Clock, Replica, ReplicaSpec, SimAnswer, SimRequest

TICK = 15.0
"""Seconds between two looks of Kubernetes' autoscaler (HPA)."""
WINDOW = 60.0
"""Seconds over which arrivals are counted."""
DRAIN = 60.0
"""Seconds in which what waits is to be worked off."""
STABLE = 300.0
"""Seconds for which fewer must have been enough before there are fewer (HPA's default)."""
TOLERANCE = 0.1
"""Part by which a ratio may differ from one without anything being done (HPA's default)."""


@dataclass(frozen=True, slots=True)
class LoadSeen:
    """What a rule is told at a tick."""

    now: float
    arrivals: float
    """Requests a second, over `WINDOW`."""
    waiting: int
    """Requests that no engine has begun."""
    served: float
    """Requests a second that have ended, over `WINDOW`."""
    replicas: int
    """Wanted at the tick before."""


Rule = Callable[[LoadSeen], float]
"""The replicas that are wanted, before rounding up."""


def by_demand(capacity: float, headroom: float = 1.0) -> Rule:
    """Arrivals and what is to be worked off, over the requests a second that one replica carries
    within the SLO; `headroom` times as many."""
    return lambda seen: headroom * (seen.arrivals + seen.waiting / DRAIN) / capacity


def by_root(capacity: float) -> Rule:
    """The demand and its square root more: what comes by chance beside many is in
    proportion less. A step of a tenth is none, as HPA has it."""

    def rule(seen: LoadSeen) -> float:
        mean = (seen.arrivals + seen.waiting / DRAIN) / capacity
        return _stepped(seen, mean + math.sqrt(mean))

    return rule


def by_queue(target: float) -> Rule:
    """Replicas times predicted wait over `target` seconds, as KEDA does with a value."""

    def rule(seen: LoadSeen) -> float:
        wait = seen.waiting / max(seen.served, 0.1)
        return _stepped(seen, seen.replicas * wait / target)

    return rule


def _stepped(seen: LoadSeen, wanted: float) -> float:
    return seen.replicas if abs(wanted / seen.replicas - 1) <= TOLERANCE else wanted


def foreseen(rate: Callable[[float], float], capacity: float, cold: float) -> Rule:
    """The rule of who knows all arrivals: the most of the time in which a replica starts."""
    ahead = [step * TICK for step in range(int(cold / TICK) + 2)]
    return lambda seen: max(rate(seen.now + later) for later in ahead) / capacity


@dataclass(slots=True)
class Scaler:
    """A router that gives requests to the replicas that are there, and follows a rule: at once up
    (at most doubled, or four more, a tick), down when fewer were enough for `STABLE` seconds."""

    rule: Rule
    cold: float
    """Seconds from when a replica is wanted until it serves."""
    least: int
    most: int
    clock: Clock = field(default_factory=Clock)
    seconds: float = 0.0
    """Replica-seconds, from when one is wanted until its last request has ended."""
    course: list[tuple[float, int]] = field(default_factory=list)
    """(time, wanted) at each change."""
    _ready: dict[int, float] = field(default_factory=dict)
    _leaving: set[int] = field(default_factory=set)
    _wishes: deque[tuple[float, int]] = field(default_factory=deque)
    _came: deque[float] = field(default_factory=deque)
    _begun: dict[int, int] = field(default_factory=dict)
    _left: deque[tuple[float, int]] = field(default_factory=deque)
    _count: int = 0
    _next: float = 0.0
    _turn: int = 0

    def choose(self, request: SimRequest, replicas: Sequence[Replica]) -> Replica:
        """The replica with the fewest requests of those that serve."""
        now = self.clock.now
        if not self._ready:
            self._ready = {one.number: 0.0 for one in replicas[: self.least]}
            self.course.append((0.0, self.least))
        while self._next <= now:
            self._tick(self._next, replicas)
            self._next += TICK
        self._came.append(now)
        self._count += 1
        there = [one for one in replicas if self._ready.get(one.number, math.inf) <= now]
        self._turn += 1
        return min(
            there, key=lambda one: (one.outstanding, (one.number + self._turn) % len(replicas))
        )

    def _tick(self, now: float, replicas: Sequence[Replica]) -> None:
        while self._came and self._came[0] < now - WINDOW:
            self._came.popleft()
        open_ = sum(one.outstanding for one in replicas)
        self._left.append((now, self._count - open_))
        while len(self._left) > 1 and self._left[1][0] <= now - WINDOW:
            self._left.popleft()
        self._leaving = {n for n in self._leaving if replicas[n].outstanding}
        self.seconds += TICK * (len(self._ready) + len(self._leaving))
        span = max(min(now, WINDOW), TICK)
        waiting = sum(one.scheduler.stats().waiting for one in replicas)
        served = (self._left[-1][1] - self._left[0][1]) / span
        have = len(self._ready)
        seen = LoadSeen(now, len(self._came) / span, waiting, served, have)
        wish = min(self.most, max(self.least, math.ceil(self.rule(seen) - 1e-9)))
        self._wishes.append((now, wish))
        while self._wishes[0][0] <= now - STABLE:
            self._wishes.popleft()
        highest = max(one for _, one in self._wishes)
        wanted = min(wish, max(2 * have, have + 4)) if wish > have else min(have, highest)
        if wanted != have:
            self.course.append((now, wanted))
        free = [n for n in range(len(replicas)) if n not in self._ready and n not in self._leaving]
        for number in free[: max(0, wanted - have)]:
            self._ready[number] = now + self.cold
        # Those that came last leave first: they may not even serve yet.
        for number in sorted(self._ready, key=lambda n: -self._ready[n])[: max(0, have - wanted)]:
            del self._ready[number]
            self._leaving.add(number)


@dataclass(frozen=True, slots=True)
class Scaled:
    """What a rule came to."""

    minutes: int
    violated: int
    """Minutes in which more than 5 % of the requests that came had their first token too late."""
    late: float
    """Share of all requests."""
    hours: float
    """Replica-hours."""
    changes: int
    turns: int
    """Changes that took back the one before within ten minutes: flapping."""


def scale(
    spec: ReplicaSpec, scaler: Scaler, requests: Iterable[tuple[float, SimRequest]], ttft: float
) -> Scaled:
    """Run the requests, (second, request) in order, on engines that the scaler adds and removes;
    `ttft`: the SLO, seconds to the first token of 95 % of a minute's requests."""
    cluster = Cluster(spec, scaler.most, scaler)
    scaler.clock = cluster.clock
    answers = cluster.run(requests)
    minutes: dict[int, list[bool]] = {}
    for one in answers:
        first = one.times[0] if one.times else math.inf
        minutes.setdefault(int(one.arrived // 60), []).append(first - one.arrived > ttft)
    late = [flag for flags in minutes.values() for flag in flags]
    course = scaler.course
    moves = [(b[0], b[1] - a[1]) for a, b in itertools.pairwise(course)]
    turns = sum(
        (a[1] > 0) != (b[1] > 0) and b[0] - a[0] < 600 for a, b in itertools.pairwise(moves)
    )
    return Scaled(
        len(minutes),
        sum(sum(flags) > 0.05 * len(flags) for flags in minutes.values()),
        sum(late) / len(late),
        scaler.seconds / 3600,
        len(moves),
        turns,
    )


def carried(
    spec: ReplicaSpec, requests: Callable[[float], list[tuple[float, SimRequest]]], ttft: float
) -> float:
    """Requests a second that one replica carries with 95 % of first tokens within `ttft` seconds,
    to 2 %; `requests`: some minutes of them at a rate. 0.0 where it carries none."""

    def kept(rate: float) -> bool:
        answers: list[SimAnswer] = Cluster(spec, 1).run(requests(rate))
        late = sum(not one.times or one.times[0] - one.arrived > ttft for one in answers)
        return late <= 0.05 * len(answers)

    low, high = 0.0, 0.05
    while kept(high):
        low, high = high, 2 * high
    while low and high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low

"""Steady state of a simulated load: its figures, if it exists.

A run has three parts. In the first the system fills, in the last it drains; neither is counted.
Between them is the window: latencies are of the requests that arrived in it, rates of those that
ended in it.

A stream of single requests starts in its steady state. Two short runs come first: one request
alone, and an engine with more users than it can hold. They give the maximum request rate. Since the
time per token grows linearly with the sequences in work, they also give the number in work at the
wanted rate (Little's law). As many requests start at random points of their answers. Otherwise the
window would have to wait for stay / (1 - load), which is long at the loads of interest.

A stream above the maximum rate has no steady state: its queue grows without bound.

The window grows until each limit of the SLO is decided: the 95 % interval of its percentile
excludes the limit. Intervals are a jackknife over ten consecutive parts of the window, because
simultaneous requests are correlated.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..engine.simulator.sim import Cluster
from ..engine.simulator.sim_replica import Replica
from .arrivals import parse_arrivals
from .material import AnyIds
from .metrics import Limit, Run, request_values
from .options import RunOptions
from .record import RequestRecord
from .statistics import t_95
from .virtual import NS, Simulation

LEAST, MOST = 200, 5000
"""Requests of a window: at least, and by default at most."""
STAYS = 2.0
"""Least length of a window, in mean residence times of a request."""
MORE = 1.5
"""Growth of a window that does not decide."""
PARTS = 10
NARROW = 0.05
"""Half width of an interval over its value at which a figure without a limit is precise enough."""
EDGE = 0.03
"""Distance from the maximum rate within which latencies take too long to settle."""
PERIODS = 20
"""Relaxation times of its queue that a window must last before a limit counts as met."""
LOOK = 32
"""Answers between two checks of a window."""
FLOODED = 300
"""Answers in a flood window, or half of the number in work if that is more."""
SAMPLE = 256
"""Sessions whose mean lengths represent all."""

Verdict = Literal["steady", "overloaded", "not steady"]
Make = Callable[[bool], Cluster]
"""Makes a cluster; with True one that can start with requests in work."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The maximum throughput of engines, regardless of latency."""

    rate: float
    """Requests per second."""
    running: float
    """Sequences in work at that rate."""
    alone: float
    """Seconds of a request alone."""
    full: float
    """Seconds of a request while `running` are in work, without its wait in the queue."""

    def of(self, count: int) -> Capacity:
        """Return the capacity of `count` such clusters."""
        return replace(self, rate=count * self.rate, running=count * self.running)

    def exceeded(self, rate: float) -> bool:
        """Return whether a rate is so far above the maximum that the queue grows without bound."""
        return rate / self.rate > 1 + EDGE

    def in_work(self, rate: float) -> int:
        """Return the requests in work at a rate, by Little's law, at most `running`."""
        slope = max(0.0, self.full - self.alone) / max(1.0, self.running - 1)
        left = 1 - rate * slope
        found = rate * (self.alone - slope) / left if left > 0 else math.inf
        return max(1, round(min(found, self.running)))


@dataclass(frozen=True, slots=True)
class Decided:
    """A limit of an SLO over a window."""

    limit: Limit
    value: float | None
    low: float
    high: float
    settled: bool = True
    """Whether the window is long enough to include rare events."""

    @property
    def kept(self) -> bool | None:
        """Return whether it is met; None: the interval contains the limit."""
        if self.value is None or self.low > self.limit.seconds:
            return False
        return True if self.settled and self.high <= self.limit.seconds else None


@dataclass(frozen=True, slots=True)
class Steady:
    """A simulated load."""

    verdict: Verdict
    window: Run
    """Requests that arrived in the window."""
    rates: Run
    """Requests that ended in it."""
    limits: tuple[Decided, ...]
    throughput: tuple[float, float]
    """95 % interval of the output tokens per second."""
    capacity: Capacity | None
    offered: float | None
    """Requests per second of an open loop."""
    simulation: Simulation

    @property
    def load(self) -> float | None:
        """Offered rate over the maximum rate."""
        if self.capacity is None or self.offered is None:
            return None
        return self.offered / self.capacity.rate

    @property
    def met(self) -> bool | None:
        """Whether the SLO is met; None: undecided, or there is none."""
        if self.verdict == "overloaded":
            return False if self.limits else None
        kept = [one.kept for one in self.limits]
        if False in kept:
            return False
        return True if kept and None not in kept and self.verdict == "steady" else None


def steady_run(
    make: Make,
    options: RunOptions,
    *,
    most: int = MOST,
    stays: float = STAYS,
    capacity: Capacity | None = None,
    whole: bool = True,
    watch: Callable[[str], None] = lambda _text: None,
) -> Steady:
    """Simulate a load until its window decides; `options.requests` is the least of a window.

    `capacity`: the cluster's, if known. A trace, or arrivals with a changing rate, run unchanged,
    with their middle as the window. Without `whole` an answer counts once it has half the mean
    tokens, so no window waits for its longest answer.
    """
    offered = rate_of(options)
    if options.trace is not None or (options.arrivals is not None and offered is None):
        return _finite(make, options)
    single = _single(options)
    if offered is not None and single and capacity is None:
        watch("the most that these engines can do")
        capacity = flood(make, options)
    load = offered / capacity.rate if offered is not None and capacity is not None else 0.0
    if not single:
        started = 0
    elif options.arrivals is None:
        started = options.concurrency
    else:
        assert capacity is not None
        assert offered is not None
        started = capacity.in_work(offered)
    watch("the load")
    least = options.requests or LEAST
    simulation = Simulation(
        make(started > 0),
        replace(options, requests=max(least, 2 * started, 64)),
        started=started,
        endless=True,
        material=AnyIds(),
    )
    over = load > 1 + EDGE
    if over:
        least = min(least, LEAST)  # A longer window of a growing queue gives no more information.
    needed = settling(options, load)
    watcher = _Watcher(
        simulation, started, least, max(least, most), stays, needed, decides=not over
    )
    if not whole:
        watcher.tokens = math.ceil(simulation.mean_lengths()[1] / 2)
    simulation.play(watcher.enough)
    verdict: Verdict = "steady"
    if over:
        verdict = "overloaded"
    elif load > 1 - EDGE:
        verdict = "not steady"
    return watcher.found(verdict, capacity, offered)


def rate_of(options: RunOptions) -> float | None:
    """Return the rate of constant-rate arrivals; None for others. Raises `InvalidRequest`."""
    kind, *numbers = (options.arrivals or "").split(":")
    if kind not in ("constant", "poisson", "gamma"):
        return None
    parse_arrivals(options.arrivals or "")
    return float(numbers[0])


def settling(options: RunOptions, load: float) -> float:
    """Return the number of requests in `PERIODS` relaxation times of a queue at a load, relative to
    the maximum.

    The relaxation time in heavy traffic is (c_a² + c_s²) / (μ (1 - ρ)²), with the squared
    coefficients of variation of arrivals and of service (here 1). A short window at a high load
    misses rare long queues, and its interval does not show it.
    """
    kind, *numbers = (options.arrivals or "constant").split(":")
    arrivals = {"poisson": 1.0, "gamma": 1 / float(numbers[-1]) if numbers else 1.0}.get(kind, 0.0)
    return PERIODS * load * (arrivals + 1) / (1 - load) ** 2 if load < 1 else math.inf


def _single(options: RunOptions) -> bool:
    """Return whether the load consists of single requests with an answer."""
    return options.workload in ("fixed", "shared-prefix", "long-context", "structured")


def flood(make: Make, options: RunOptions) -> Capacity:
    """Return the engines' capacity: more users than they hold, each always with a request.

    The users start at random points of their answers. The window begins when as many answers have
    ended as the engines hold.
    """
    loaded = replace(options, arrivals=None, slo=None, requests=SAMPLE)
    quick = AnyIds()
    probe = Simulation(make(False), replace(loaded, requests=SAMPLE, concurrency=1), material=quick)
    lengths = probe.mean_lengths()
    probe.play(lambda: True)
    alone = probe.records[0]
    cluster = make(True)
    held = sum(_held(one, sum(lengths)) for one in cluster.replicas if one.role != "prefill")
    users = math.ceil(1.25 * held) + 4
    loaded = replace(loaded, concurrency=users, requests=3 * users)
    simulation = Simulation(cluster, loaded, started=users, endless=True, material=quick)
    marks: list[tuple[float, int]] = []
    last = held + min(2 * held, max(held // 2, FLOODED))

    def enough() -> bool:
        if len(simulation.records) in (held, last):
            marks.append((cluster.clock.now, cluster.tokens))
        return len(marks) > 1

    simulation.play(enough)
    (begin, before), (end, after) = marks
    done = (after - before) / lengths[1] / (end - begin)
    late = [one for one in simulation.records if one.end_ns > begin * NS and one.chunk_ns]
    # By the token: in a window, short answers are over-represented.
    writing = sum(one.end_ns - one.chunk_ns[0] for one in late) / NS
    steps = sum(len(one.chunk_ns) - 1 for one in late)
    each = (lengths[1] - 1) * writing / max(1, steps)
    alone_seconds = (alone.end_ns - alone.planned_ns) / NS
    return Capacity(done, max(1.0, done * each), alone_seconds, max(each, alone_seconds))


def _held(replica: Replica, length: float) -> int:
    """Return the sequences of a mean length that an engine holds."""
    rows = replica.scheduler.limits.rows
    return max(1, min(rows, int(replica.kv.capacity / max(1.0, length))))


@dataclass(slots=True)
class _Watcher:
    """The window of a running simulation."""

    simulation: Simulation
    started: int
    least: int
    most: int
    stays: float
    needed: float
    decides: bool
    _begin: float | None = None
    _highest: int = 1
    _wanted: int = 0
    tokens: int | None = None
    """Tokens from which an answer in work counts; None: never."""

    def enough(self) -> bool:
        """Return whether the window that ends here decides."""
        simulation = self.simulation
        ended = len(simulation.records)
        self._highest = max(self._highest, simulation.in_work)
        if self._begin is None:
            # A cold start needs some residence times until the number in work is stable.
            needed = self.started or max(50, 3 * self._highest)
            if ended >= max(20, needed):
                self._begin = simulation.cluster.clock.now
                self._wanted = max(self.least, math.ceil(self.stays * self._highest))
            return False
        if ended % LOOK:
            return False
        came = ended
        if self.tokens is not None:
            came = simulation.came(self._begin, simulation.waiting_since(self.tokens))
        if came < self._wanted:
            return False
        window = self.window()
        if len(window.records) < self._wanted:
            return False
        if len(window.records) >= self.most or not self.decides or self._narrow(window):
            return True
        self._wanted = min(self.most, math.ceil(MORE * len(window.records)))
        return False

    def window(self) -> Run:
        """Return the requests that arrived in the window, all of which count."""
        begin, end = self._begin or 0.0, self.simulation.waiting_since(self.tokens)
        if end <= begin:  # Nothing is in work: all arrivals.
            end = self.simulation.cluster.clock.now
        return part(self.simulation, begin, end, self.tokens)

    def _narrow(self, window: Run) -> bool:
        limits = decided(window, self.needed)
        if any(one.kept is False for one in limits):
            return True
        if limits or self.simulation.options.arrivals is not None:
            return all(one.kept for one in limits)
        low, high = throughput(ended_in(self.simulation, window))
        return high - low <= NARROW * (high + low)

    def found(self, verdict: Verdict, capacity: Capacity | None, offered: float | None) -> Steady:
        window = self.window()
        if self._begin is None or not window.records:
            verdict, window = "not steady", part(self.simulation, 0.0, math.inf)
        return of(self.simulation, window, verdict, capacity, offered, self.needed)


def _finite(make: Make, options: RunOptions) -> Steady:
    """Run a load with a start and an end; the window omits one residence time at both."""
    simulation = Simulation(make(False), options)
    simulation.play(lambda: False)
    records = simulation.records
    stay = statistics.median(one.end_ns - one.planned_ns for one in records)
    planned = [one.planned_ns for one in records]
    window = part(simulation, (min(planned) + stay) / NS, (max(planned) - stay) / NS)
    if len(window.records) < len(records) / 4:
        return of(simulation, part(simulation, 0.0, math.inf), "not steady", None, None)
    return of(simulation, window, "steady", None, None)


def of(
    simulation: Simulation,
    window: Run,
    verdict: Verdict,
    capacity: Capacity | None,
    offered: float | None,
    needed: float = 0.0,
) -> Steady:
    rates = ended_in(simulation, window)
    limits = decided(window, needed)
    return Steady(verdict, window, rates, limits, throughput(rates), capacity, offered, simulation)


def part(simulation: Simulation, begin: float, end: float, tokens: int | None = None) -> Run:
    """Return the requests that arrived between two times, in order; `tokens`: also unfinished ones
    with at least this many tokens."""
    end = min(end, max((one.end_ns for one in simulation.records), default=NS) / NS)
    start_ns, end_ns = round(begin * NS), max(round(end * NS), round(begin * NS) + 1)
    records = simulation.records + ([] if tokens is None else simulation.unfinished(tokens))
    kept = [one for one in records if start_ns <= one.planned_ns <= end_ns]
    kept.sort(key=lambda one: one.planned_ns)
    return simulation.run_of(kept, start_ns, end_ns)


def ended_in(simulation: Simulation, window: Run) -> Run:
    """Return the requests that ended in the time of a window."""
    kept = [one for one in simulation.records if window.start_ns < one.end_ns <= window.end_ns]
    return simulation.run_of(kept, window.start_ns, window.end_ns)


def decided(window: Run, needed: float) -> tuple[Decided, ...]:
    """Decide each limit of the SLO; a window settles with `needed` requests."""
    records = window.records
    settled = len(records) >= needed
    return tuple(
        _decide(records, limit, settled) for limit in (window.slo.limits if window.slo else ())
    )


def _decide(records: Sequence[RequestRecord], limit: Limit, settled: bool) -> Decided:
    values = [request_values(limit.metric, one) if one.ok else [math.inf] for one in records]
    low, value, high = interval(values, limit.percentile)
    return Decided(limit, value if math.isfinite(value) else None, low, high, settled)


def interval(values: Sequence[Sequence[float]], percentile: float) -> tuple[float, float, float]:
    """Return (low, value, high) of a percentile: a jackknife over consecutive parts of a sequence
    of samples."""
    edges = np.linspace(0, len(values), PARTS + 1).astype(int)
    parts = [
        np.array([one for each in values[low:high] for one in each])
        for low, high in itertools.pairwise(edges)
    ]
    parts = [one for one in parts if one.size]
    if not parts:
        return math.inf, math.inf, math.inf
    value = float(np.percentile(np.concatenate(parts), percentile, method="higher"))
    if len(parts) < 2 or not math.isfinite(value):
        return value, value, value
    without = np.array(
        [
            np.percentile(np.concatenate(parts[:n] + parts[n + 1 :]), percentile, method="higher")
            for n in range(len(parts))
        ]
    )
    count = len(parts)
    spread = math.sqrt((count - 1) / count * float(np.sum((without - without.mean()) ** 2)))
    half = t_95(count - 1) * spread
    return max(0.0, value - half), value, value + half


def throughput(rates: Run) -> tuple[float, float]:
    """Return the 95 % interval of the output tokens per second."""
    if not rates.records:
        return 0.0, 0.0
    edges = np.linspace(rates.start_ns, rates.end_ns, PARTS + 1)
    tokens, _ = np.histogram(
        [one.end_ns for one in rates.good], edges, weights=[one.tokens for one in rates.good]
    )
    each = tokens / ((edges[1] - edges[0]) / NS)
    half = t_95(PARTS - 1) * float(each.std(ddof=1)) / math.sqrt(PARTS)
    return float(each.mean()) - half, float(each.mean()) + half


def document(found: Steady) -> dict[str, Any]:
    """Return the result of the window, with `simulation.steady`."""
    result = found.simulation.document(found.window, found.rates)
    if result["slo"] is not None:
        result["slo"]["met"] = found.met
        for check, one in zip(result["slo"]["checks"], found.limits, strict=True):
            check["kept"] = one.kept
            check["interval"] = [one.low, one.high] if math.isfinite(one.high) else None
    capacity = found.capacity
    result["simulation"]["steady"] = {
        "verdict": found.verdict,
        "from": found.window.start_ns / NS,
        "to": found.window.end_ns / NS,
        "requests": len(found.window.records),
        "left_out": len(found.simulation.records) - len(found.window.records),
        "offered_rate": found.offered,
        "most_rate": None if capacity is None else capacity.rate,
        "load": found.load,
        "output_throughput_interval": list(found.throughput),
    }
    result["valid"] = found.verdict == "steady" and (found.met is not None or not found.limits)
    return result

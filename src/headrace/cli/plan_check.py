"""Simulation of a plan's candidates, which decides."""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import numpy as np

from ..base.hardware import cpu
from ..bench.metrics import request_values
from ..bench.options import RunOptions
from ..bench.record import RequestRecord
from ..bench.steady_run import Capacity, Steady, flood, steady_run
from ..engine.loop.draft_law import DraftLaw
from ..engine.simulator.sim import Cluster
from ..engine.simulator.sim_replica import ReplicaSpec
from ..roofline.planner import Candidate, Pool
from ..roofline.steady import Demand, Goal

P = ParamSpec("P")
T = TypeVar("T")

GROWTH = 4
"""Number of times that a candidate which misses gets 15 % more replicas."""
MAX_SIMULATED = 4
"""Most engines of a simulation; larger layouts are checked by a part with its share of the load."""
MOST_REQUESTS = 500
"""Most requests of a simulation without a decision, unless the user asks for more."""
STAYS = 0.5
"""Least length of a simulated window, in mean residence times of a request. It matters from about
1,000 requests in work, whose number varies by 3 %."""
STEP, CLOSE, TRIES = 1.08, 1.06, 5
"""Search for the maximum request rate: growth of the rate, the ratio of missed to met rates at
which it ends, and most simulations."""
FULLEST = 0.9
"""Share of the engines' capacity above which waits take too long to settle."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A candidate after the simulation, at its final replicas and rate; p99 in seconds."""

    candidate: Candidate
    ttft: float
    tpot: float
    itl: float
    kept: bool
    per_user: float
    """Median output tokens per second of one user."""
    missed: float | None = None
    """Least rate seen to miss, of given devices."""


@dataclass(frozen=True, slots=True)
class Check:
    """The terms of a simulation."""

    demand: Demand
    goal: Goal
    requests: int
    trace: str | None = None
    law: DraftLaw | None = None

    def verify(self, candidate: Candidate) -> Checked:
        """Simulate; add replicas while it misses. A load above the capacity misses without a
        simulation."""
        most: dict[tuple[int, ...], Capacity] = {}
        for _ in range(GROWTH):
            part = _Part(candidate, self)
            capacity = part.capacity(most)
            if capacity is None or not capacity.exceeded(candidate.rate * part.share):
                found = part.checked(part.run(candidate.rate, capacity), candidate.rate)
                if found.kept:
                    return found
            candidate = grown(candidate)
        return self.at(candidate, most)

    def most(self, candidate: Candidate, watch: Callable[[str], None]) -> Checked:
        """Find the maximum request rate at which the candidate meets the limits."""
        part = _Part(candidate, self)
        watch(f"{candidate}: the most it can do")
        capacity = part.capacity({})
        assert capacity is not None, "given devices have no trace"
        highest = FULLEST * capacity.rate / part.share
        rate, kept, missed = min(candidate.rate, highest), None, None
        last: Checked | None = None
        for _ in range(TRIES):
            watch(f"{candidate}: {rate:.3g} requests/s")
            last = part.checked(part.run(rate, capacity), rate)
            if last.kept:
                kept = last
                if missed is None and rate >= highest:
                    break
            else:
                missed = rate
            if kept is None:
                rate /= STEP**2
            elif missed is None:
                rate = min(highest, rate * STEP)
            elif missed / kept.candidate.rate < CLOSE * STEP:
                break
            else:
                rate = (kept.candidate.rate + missed) / 2
        assert last is not None
        return replace(kept or last, missed=missed)

    def at(
        self, candidate: Candidate, most: dict[tuple[int, ...], Capacity] | None = None
    ) -> Checked:
        """Simulate at the candidate's own rate. `most`: see `_Part.capacity`."""
        part = _Part(candidate, self)
        capacity = part.capacity({} if most is None else most)
        return part.checked(part.run(candidate.rate, capacity), candidate.rate)


class _Here(Executor):
    """Executor that runs jobs at once in this thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        done: Future[T] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@contextmanager
def workers() -> Iterator[Executor]:
    """Yield processes on all cores, each started with its first job; this thread on one core."""
    cores = cpu().physical_cores
    if cores < 2:
        yield _Here()
        return
    spawn = multiprocessing.get_context("spawn")
    ignored = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(cores, spawn, signal.signal, ignored) as pool:
        try:
            yield pool
        finally:  # Neither Ctrl-C nor an answer waits for unused results.
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.kill()


class _Part:
    """The simulated engines of a candidate, with their share of the load."""

    def __init__(self, candidate: Candidate, check: Check) -> None:
        self._candidate, self._check = candidate, check
        pools = candidate.pools
        engines = sum(pool.replicas * pool.case.layout.engines for pool in pools)
        share = min(1.0, MAX_SIMULATED / engines)
        self._used = [max(1, round(pool.replicas * share)) for pool in pools]
        self.share = min(n / pool.replicas for n, pool in zip(self._used, pools, strict=True))
        self._specs = [_spec(candidate, pool, check) for pool in pools]

    def capacity(self, known: dict[tuple[int, ...], Capacity]) -> Capacity | None:
        """Measure the part's capacity; for equal replicas without shared prefixes, one replica's.
        None: a trace determines its own rate.

        `known`: capacities of other parts of the same engines, by their numbers of replicas.
        """
        if self._check.trace is not None:
            return None
        options = self.options(self._candidate.rate)
        alone = len(self._specs) == 1 and not self._check.demand.shared_tokens
        key = (1,) if alone else tuple(self._used)
        if key not in known:
            known[key] = flood(lambda warm: self.make(warm, 1 if alone else None), options)
        return known[key].of(self._used[0]) if alone else known[key]

    def make(self, warm: bool, replicas: int | None = None) -> Cluster:
        return Cluster(
            self._specs[0],
            replicas or sum(self._used),
            "prefix" if self._check.demand.shared_tokens else "least-loaded",
            prefill=self._used[0] if len(self._specs) > 1 else 0,
            decode_spec=self._specs[-1],
            warm=warm,
        )

    def options(self, rate: float) -> RunOptions:
        """Return a Poisson load with spread lengths; `rate` is of the whole candidate."""
        demand, goal = self._check.demand, self._check.goal
        # The log-normal's median for this mean, at sigma 0.4.
        median = {
            name: max(1, round(mean / 1.083))
            for name, mean in (("input", demand.fresh), ("output", demand.output_tokens))
        }
        limits = [f"ttft:p99<{goal.ttft:.6f}s", f"tpot:p99<{goal.tpot:.6f}s"]
        if goal.itl is not None:
            limits.append(f"itl:p99<{goal.itl:.6f}s")
        return RunOptions(
            url="simulated",
            workload="shared-prefix" if demand.shared_tokens else "fixed",
            prefix_tokens=max(1, demand.shared_tokens),
            groups=4,
            requests=None if self._check.trace else self._check.requests,
            trace=self._check.trace,
            input=f"lognormal:{median['input']}:0.4@1-{2 * demand.input_tokens}",
            output=f"lognormal:{median['output']}:0.4@2-{2 * demand.output_tokens + 2}",
            arrivals=f"poisson:{rate * self.share}",
            slo=",".join(limits),
        )

    def run(self, rate: float, capacity: Capacity | None) -> Steady:
        return steady_run(
            self.make,
            self.options(rate),
            most=MOST_REQUESTS,
            stays=STAYS,
            capacity=capacity,
            whole=False,
        )

    def checked(self, found: Steady, rate: float) -> Checked:
        records = [one for one in found.window.records if one.ok]
        p99 = {name: _percentile(name, records, 99) for name in ("ttft", "tpot", "itl")}
        each = _percentile("tpot", records, 50)
        kept = found.verdict != "overloaded" and all(
            one.value is not None and one.value <= one.limit.seconds for one in found.limits
        )
        candidate = replace(self._candidate, rate=rate)
        return Checked(candidate, **p99, kept=kept, per_user=1 / each if each else 0.0)


def _percentile(metric: str, records: Sequence[RequestRecord], percentile: float) -> float:
    values = [value for one in records for value in request_values(metric, one)]
    return float(np.percentile(values, percentile, method="higher")) if values else math.inf


def _spec(candidate: Candidate, pool: Pool, check: Check) -> ReplicaSpec:
    demand = check.demand
    longest = 4 * (demand.input_tokens + demand.output_tokens)
    return ReplicaSpec(
        pool.case,
        candidate.hardware,
        rows=max(8, pool.state.batch),
        step_tokens=max(pool.state.step_tokens, pool.state.batch + 16),
        depth=1 if pool.case.layout.pp > 1 else 2,
        max_context=min(pool.case.arch.max_context, longest),
        prefix_cache=demand.shared_tokens > 0 or check.trace is not None,
        drafts=check.law,
    )


def grown(candidate: Candidate) -> Candidate:
    """Add 15 % more replicas in each pool, and their price."""
    pools = tuple(
        replace(pool, replicas=max(pool.replicas + 1, round(pool.replicas * 1.15)))
        for pool in candidate.pools
    )
    devices = sum(pool.devices for pool in pools)
    return replace(
        candidate,
        pools=pools,
        price_per_hour=candidate.price_per_hour * devices / candidate.devices,
    )

"""The loop that joins the planes: accept → schedule → submit → update → emit.

There is one. `depth` 1 is synchronous, 2 plans the next step while one computes. The driver of the
loop decides where requests come from and where deltas go: `engine.process` over a channel,
`engine.clients.llm` by a function call.

The loop holds lanes, one for each model that is served. A step belongs to one lane; if several have
work, an arbiter chooses (`sched.arbiter`), and no step takes long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...base.errors import EngineDead
from ...base.request import Request, SequenceDelta, StepStats
from ...base.step import StepPlan
from ...obs.flight import FlightRecorder
from ...roofline.step import Estimate
from ...sched.arbiter import Arbiter
from .adapters import AdapterSlots
from .executor import Executor, StepFuture
from .lane import Lane, Planner

BOUND = 8.0
"""Limit of a step's time, as a multiple of its predicted time and the recent slowdown."""
QUIET_SECONDS = 1.0


class Flying(NamedTuple):
    """A step in flight."""

    model: int
    lane: Lane
    plan: StepPlan
    future: StepFuture
    expected: Estimate | None
    price: float
    """Seconds that the arbiter counted for it."""


class Told(NamedTuple):
    """The outcome of a turn for one model."""

    model: int
    lane: Lane
    deltas: list[SequenceDelta]


class EngineCore:
    """Schedulers and executors, joined."""

    def __init__(
        self,
        scheduler: Planner,
        executor: Executor,
        *,
        depth: int = 1,
        flight: FlightRecorder | None = None,
        check: bool = False,
        adapters: AdapterSlots | None = None,
        predict: Callable[[StepPlan], Estimate] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the loop with its first model. `check`: verify every plan, and the control plane
        whenever it is idle. `predict`: see `Lane`."""
        self.lanes = {0: Lane(scheduler, executor, adapters=adapters, predict=predict)}
        """By the model's number."""
        self._arbiter = Arbiter()
        self._arbiter.join(0)
        self._depth = depth
        self._flight = flight or FlightRecorder(records=32)
        self._check = check
        self._clock = clock
        self.stalled = False
        """Whether there is work but nothing can run now. Then `executor.wake` rings when it can."""
        self.announce: Callable[[float], None] | None = None
        """Callback, before a step that may exceed `QUIET_SECONDS`, with its longest time."""
        self._flying: deque[Flying] = deque()
        self._schedule_seconds = 0.0
        self._idle_seconds = 0.0
        self._device_free_at: float | None = None
        """Time when the device last ran out of steps while there was work; None: it has one."""
        self._dead: EngineDead | None = None

    # Models

    def join(self, model: int, lane: Lane, weight: float = 1.0) -> None:
        """Serve one model more, under an unused number. Raises `OptionError` for a wrong weight."""
        assert model not in self.lanes
        self._arbiter.join(model, weight)
        self.lanes[model] = lane

    def weigh(self, model: int, weight: float) -> None:
        """Set a model's share of the time, relative to others. Raises as `join` does."""
        self._arbiter.weigh(model, weight)

    def leave(self, model: int) -> Lane:
        """Stop to serve a model that has no work."""
        lane = self.lanes[model]
        assert not lane.has_work, "its requests have ended"
        self._arbiter.leave(model)
        del self.lanes[model]
        if len(self.lanes) == 1:
            self.first.share(alone=True)
        return lane

    @property
    def first(self) -> Lane:
        """The lane of the first model."""
        return next(iter(self.lanes.values()))

    @property
    def scheduler(self) -> Planner:
        """The first model's."""
        return self.first.scheduler

    @property
    def executor(self) -> Executor:
        """The first model's; all ring the same bell."""
        return self.first.executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        self.first.executor = executor

    @property
    def stats(self) -> StepStats:
        """Counts after the first model's latest step."""
        return self.first.stats

    @stats.setter
    def stats(self, stats: StepStats) -> None:
        self.first.stats = stats

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute, to wait for, or to report."""
        return bool(self._flying) or any(lane.has_work for lane in self.lanes.values())

    @property
    def max_context(self) -> int:
        """Longest sequence of the first model that is served: the limit, or the pool's capacity."""
        return self.scheduler.max_context

    # Requests

    def add(self, request: Request, model: int = 0) -> None:
        """Accept a request. Raises what `Scheduler.add` raises."""
        if not self.has_work:
            self._device_free_at = None  # Time without work is not the engine's idleness.
        self.lanes[model].scheduler.add(request)
        self.stalled = False

    def abort(self, request_id: str, model: int = 0) -> None:
        """See `Lane.abort`."""
        self.lanes[model].abort(request_id)
        self.stalled = False

    def abort_choice(self, request_id: str, choice: int, model: int = 0) -> None:
        """See `Lane.abort_choice`."""
        self.lanes[model].abort_choice(request_id, choice)
        self.stalled = False

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter of the first model: see `Lane.load_adapter`."""
        self.first.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter of the first model: see `Lane.unload_adapter`."""
        self.first.unload_adapter(name)

    # Steps

    def turn(self) -> list[SequenceDelta]:
        """Make one turn of the loop and return the deltas of all models: see `step`."""
        told = self.step()
        if len(told) == 1:
            return told[0].deltas
        return [delta for one in told for delta in one.deltas]

    def step(self) -> list[Told]:
        """Make one turn of the loop: fill the pipeline, take the oldest result, return what each
        model has to report.

        Waits for the device. Raises `EngineDead` if the worker is gone or fails every step, and
        from then on always.
        """
        if self._dead is not None:
            raise self._dead
        try:
            return self._turn()
        except EngineDead as error:
            self._dead = error
            raise

    def _turn(self) -> list[Told]:
        self._fill()
        lanes, stepped = self.lanes, None
        if self._flying:
            self.stalled = False
            step = self._flying.popleft()
            stepped = step.lane
            self._land(step)
        else:
            told = any(lane.told for lane in lanes.values())
            self.stalled = not told and any(lane.scheduler.has_work for lane in lanes.values())
        found = []
        for model, lane in lanes.items():
            if lane is stepped or lane.told:
                if lane is not stepped:
                    # An abort changed the running set, and no step follows to report it.
                    lane.stats = lane.scheduler.stats()
                found.append(Told(model, lane, lane.told))
                lane.told = []
            if not self._flying:
                if lane.unloading:
                    lane.forget_adapters()
                if self._check and not lane.scheduler.has_work:
                    lane.scheduler.check_integrity()
        return found

    def _next(self) -> tuple[int, StepPlan | None]:
        """Return the next plan and its model."""
        lanes = self.lanes
        if len(lanes) == 1:
            for model, lane in lanes.items():
                return model, lane.scheduler.schedule()
        working = [model for model, lane in lanes.items() if lane.scheduler.has_work]
        for model in self._arbiter.order(working):
            lane = lanes[model]
            lane.share(alone=len(working) == 1)
            plan = lane.scheduler.schedule()
            if plan is not None:
                return model, plan
        return 0, None

    def _fill(self) -> None:
        while len(self._flying) < self._depth:
            begin = self._clock()
            model, plan = self._next()
            self._schedule_seconds = self._clock() - begin
            if plan is None:
                return
            lane = self.lanes[model]
            if self._check:
                plan.verify()
            stats = lane.stats
            self._flight.submitted(plan, stats.running, stats.waiting, model)
            if self._device_free_at is None or self._flying:
                self._idle_seconds = 0.0
            else:
                self._idle_seconds = self._clock() - self._device_free_at
            expected = lane.estimate(plan)
            if expected is not None and self.announce is not None:
                bound = BOUND * lane.slower * expected[0]
                if bound > QUIET_SECONDS:
                    self.announce(bound)
            price = 0.0
            if len(self.lanes) > 1:
                if plan.tokens:  # Else it only encodes, which `correct` charges.
                    price = lane.prices.seconds(plan.tokens)
                self._arbiter.begin(model, price)
            future = lane.executor.submit(plan)
            self._flying.append(Flying(model, lane, plan, future, expected, price))

    def _land(self, step: Flying) -> None:
        """Take the result of the oldest step in flight."""
        lane, plan = step.lane, step.plan
        result = step.future.result()
        if not self._flying:
            self._device_free_at = self._clock()
        stats = lane.update(plan, result, step.expected)
        if len(self.lanes) > 1:
            if plan.tokens:
                lane.prices.observe(plan.tokens, result.seconds - result.encoding)
            self._arbiter.correct(step.model, result.seconds - step.price)
        stats.schedule_seconds = self._schedule_seconds
        stats.idle_seconds = self._idle_seconds
        self._flight.finished(plan, result, stats, step.model)
        lane.check_working(result)

"""The loop that joins the planes: accept → schedule → submit → update → emit.

There is one. `depth` 1 is synchronous, 2 plans the next step while one computes. The driver of the
loop decides where requests come from and where deltas go: `engine.process` over a channel,
`engine.clients.llm` by a function call.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from ...base.errors import EngineDead, InvalidRequest
from ...base.request import Request, SequenceDelta, StepStats
from ...base.step import StepPlan, StepResult
from ...loader.content import adapter_digest
from ...obs.flight import FlightRecorder
from ...roofline.step import Estimate
from ...sched.limits import StepRoom
from .adapters import AdapterSlots
from .executor import Executor, StepFuture

log = logging.getLogger("headrace.engine")

PREDICTED_FOR = 16
"""Steps for which the estimate of a decoding step stands, while as many sequences decode."""
BOUND = 8.0
"""Limit of a step's time, as a multiple of its predicted time and the recent slowdown."""
QUIET_SECONDS = 1.0
FAILED_STEPS = 3
"""Failures in a row after which the worker is taken to be broken."""


class Planner(Protocol):
    """The interface of the control plane that the loop uses (`sched.Scheduler` is one)."""

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> list[SequenceDelta]: ...
    def abort_choice(self, request_id: str, choice: int) -> list[SequenceDelta]: ...
    def schedule(self) -> StepPlan | None: ...
    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]: ...
    def fail(self, plan: StepPlan, message: str, *, again: bool = False) -> list[SequenceDelta]: ...
    def stats(self) -> StepStats: ...
    def check_integrity(self) -> None: ...
    def requests(self) -> Iterable[Request]: ...
    @property
    def room(self) -> StepRoom: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def max_context(self) -> int: ...
    @property
    def waiting(self) -> int: ...


class EngineCore:
    """Scheduler and executor, joined."""

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
        """`check`: verify every plan, and the control plane whenever it is idle. `predict`: the
        roofline's estimate of a plan, shown next to the measurement."""
        self.scheduler = scheduler
        self.executor = executor
        self.stats = StepStats()
        self._depth = depth
        self._flight = flight or FlightRecorder(records=32)
        self._check = check
        self._clock = clock
        self._predict = predict
        self._last_estimate: tuple[int, int, Estimate] | None = None
        """(entries, step, estimate) of the latest step that only decoded and was estimated."""
        self.stalled = False
        """Whether there is work but nothing can run now. Then `executor.wake` rings when it can."""
        self.announce: Callable[[float], None] | None = None
        """Callback, before a step that may exceed `QUIET_SECONDS`, with its longest time."""
        self._slower = 1.0
        """Largest recent ratio of a step's time to its prediction."""
        self._flying: deque[tuple[StepPlan, StepFuture, Estimate | None]] = deque()
        self._emitted: list[SequenceDelta] = []
        self._schedule_seconds = 0.0
        self._idle_seconds = 0.0
        self._device_free_at: float | None = None
        """Time when the device last ran out of steps while there was work; None: it has one."""
        self._failures = 0
        self._dead: EngineDead | None = None
        self._adapters = adapters
        self._unloading: set[str] = set()
        """Adapters that new requests cannot have, until the last request with one has ended."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute, to wait for, or to report."""
        return bool(self._flying or self._emitted) or self.scheduler.has_work

    @property
    def max_context(self) -> int:
        """Longest sequence that is served: the limit, or the pool's capacity."""
        return self.scheduler.max_context

    def add(self, request: Request) -> None:
        """Accept a request. Raises what `Scheduler.add` raises."""
        if not self.has_work:
            self._device_free_at = None  # Time without work is not the engine's idleness.
        self.scheduler.add(request)
        self.stalled = False

    def abort(self, request_id: str) -> None:
        """End a request in any state; its deltas come with the next turn."""
        self._emitted += self.scheduler.abort(request_id)
        self.stalled = False

    def abort_choice(self, request_id: str, choice: int) -> None:
        """End one choice of a request, whose reader has seen a stop string."""
        self._emitted += self.scheduler.abort_choice(request_id, choice)
        self.stalled = False

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter. Raises `InvalidRequest` if none are served, and errors of the files."""
        if self._adapters is None:
            raise InvalidRequest(
                "this engine serves no adapters (option max_adapters)", param="lora_name"
            )
        self.executor.load_adapter(name, path)
        self._adapters.add(name, adapter_digest(Path(path)))

    def unload_adapter(self, name: str) -> None:
        """Refuse the adapter to new requests from now on; those that have it end as usual."""
        if self._adapters is not None and name in self._adapters.known:
            self._adapters.known.pop(name, None)
            self._unloading.add(name)
            self._unload()

    def _unload(self) -> None:
        needed = {request.spec.adapter for request in self.scheduler.requests()}
        for name in self._unloading - needed:
            self._unloading.discard(name)
            self.executor.unload_adapter(name)

    def turn(self) -> list[SequenceDelta]:
        """Make one turn of the loop: fill the pipeline, take the oldest result, return the deltas.

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

    def _turn(self) -> list[SequenceDelta]:
        self._fill()
        self.stalled = not (self._flying or self._emitted) and self.scheduler.has_work
        if self._flying:
            plan, future, expected = self._flying.popleft()
            result = future.result()
            if not self._flying:
                self._device_free_at = self._clock()
            self._update(plan, result, expected)
        elif self._emitted:
            # An abort changed the running set, and no step follows to report it.
            self.stats = self.scheduler.stats()
        if self._unloading and not self._flying:
            self._unload()
        if self._check and not self._flying and not self.scheduler.has_work:
            self.scheduler.check_integrity()
        emitted, self._emitted = self._emitted, []
        return emitted

    def _fill(self) -> None:
        while len(self._flying) < self._depth:
            begin = self._clock()
            plan = self.scheduler.schedule()
            self._schedule_seconds = self._clock() - begin
            if plan is None:
                return
            if self._check:
                plan.verify()
            stats = self.stats
            self._flight.submitted(plan, stats.running, stats.waiting)
            if self._device_free_at is None or self._flying:
                self._idle_seconds = 0.0
            else:
                self._idle_seconds = self._clock() - self._device_free_at
            expected = None if self._predict is None else self._expected(plan)
            if expected is not None and self.announce is not None:
                bound = BOUND * self._slower * expected[0]
                if bound > QUIET_SECONDS:
                    self.announce(bound)
            self._flying.append((plan, self.executor.submit(plan), expected))

    def _expected(self, plan: StepPlan) -> Estimate:
        """Return the roofline's estimate of a plan. For a plan that decodes as many sequences as
        the last it hardly changes, so it is computed again only every few steps."""
        assert self._predict is not None
        entries, before = len(plan.rows), self._last_estimate
        # The unit of another part is another amount of work: one image is no decoded token.
        decodes = not plan.parts and sum(plan.counts) == entries
        if decodes and before is not None:
            known, number, estimate = before
            if known == entries and 0 < plan.number - number < PREDICTED_FOR:
                return estimate
        estimate = self._predict(plan)
        self._last_estimate = (entries, plan.number, estimate) if decodes else None
        return estimate

    def _update(self, plan: StepPlan, result: StepResult, expected: Estimate | None) -> None:
        assert result.number == plan.number, f"result {result.number} for step {plan.number}"
        if result.error is None:
            self._failures = 0
            self._emitted += self.scheduler.update(plan, result)
        elif result.cause == "memory" and self.scheduler.room.halve():
            log.warning("a step found no memory; smaller ones begin it again: %s", result.error)
            self._emitted += self.scheduler.fail(plan, result.error, again=True)
        else:
            self._failures += 1
            self._emitted += self.scheduler.fail(plan, result.error)
        stats = self.scheduler.stats()
        stats.seconds = result.seconds
        if expected is not None:
            if result.error is None and expected[0] > 0:
                self._slower = max(1.0, 0.99 * self._slower, result.seconds / expected[0])
            stats.predicted_seconds, stats.flops, stats.bytes, stats.launch_seconds = expected
        stats.schedule_seconds = self._schedule_seconds
        stats.idle_seconds = self._idle_seconds
        self.stats = stats
        self._flight.finished(plan, result, stats)
        if result.cause == "device":
            raise EngineDead(f"the device is lost: {result.error}")
        if self._failures >= FAILED_STEPS:
            raise EngineDead(f"{self._failures} steps failed in a row: {result.error}")

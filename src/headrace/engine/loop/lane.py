"""One model in the loop: its control plane, its worker, and what its steps have shown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from ...base.errors import EngineDead, InvalidRequest
from ...base.request import Request, SequenceDelta, StepStats
from ...base.step import StepPlan, StepResult
from ...loader.content import adapter_digest
from ...roofline.step import Estimate
from ...sched.limits import StepRoom
from ...sched.price import FEWEST, STEP_SECONDS, StepPrices, tokens_that_fit
from .adapters import AdapterSlots
from .executor import Executor

log = logging.getLogger("headrace.engine")

PREDICTED_FOR = 16
"""Steps for which the estimate of a decoding step stands, while as many sequences decode."""
FAILED_STEPS = 3
"""Failures in a row after which the worker is taken to be broken."""
GUESSED = 1e-3
"""Seconds of a token before any step was timed."""


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
    @property
    def pressure(self) -> tuple[int, int]: ...


class Lane:
    """A model that is served: `EngineCore` chooses whose step is next."""

    def __init__(
        self,
        scheduler: Planner,
        executor: Executor,
        *,
        adapters: AdapterSlots | None = None,
        predict: Callable[[StepPlan], Estimate] | None = None,
    ) -> None:
        """`predict`: the roofline's estimate of a plan, shown next to the measurement."""
        self.scheduler = scheduler
        self.executor = executor
        self.stats = StepStats()
        self.told: list[SequenceDelta] = []
        """Deltas that the next turn reports."""
        self.slower = 1.0
        """Largest recent ratio of a step's time to its prediction."""
        self.failures = 0
        """Failures in a row."""
        self.prices = StepPrices(lambda tokens: GUESSED * tokens)
        """Seconds of steps, learned while several models are served."""
        self.predict = predict
        self._last_estimate: tuple[int, int, Estimate] | None = None
        """(entries, step, estimate) of the latest step that only decoded and was estimated."""
        self._adapters = adapters
        self.unloading: set[str] = set()
        """Adapters that new requests cannot have, until the last request with one has ended."""

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute, to wait for, or to report."""
        return bool(self.told) or self.scheduler.has_work

    def abort(self, request_id: str) -> None:
        """End a request in any state; its deltas come with the next turn."""
        self.told += self.scheduler.abort(request_id)

    def abort_choice(self, request_id: str, choice: int) -> None:
        """End one choice of a request, whose reader has seen a stop string."""
        self.told += self.scheduler.abort_choice(request_id, choice)

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
            self.unloading.add(name)
            self.forget_adapters()

    def forget_adapters(self) -> None:
        """Have the worker forget adapters that are unloaded and that no request has. Called while
        no step of this model is in flight."""
        needed = {request.spec.adapter for request in self.scheduler.requests()}
        for name in self.unloading - needed:
            self.unloading.discard(name)
            self.executor.unload_adapter(name)

    def share(self, *, alone: bool) -> None:
        """Bound the next step: other models that have work wait for its end, unless it is
        `alone`."""
        room = self.scheduler.room
        if alone:
            room.shared = None
            return
        decodes, prompts = self.scheduler.pressure
        fit = FEWEST  # Without a prompt the bound has no effect, and finding it takes 0.1 ms.
        if prompts or self.scheduler.waiting:
            fit = tokens_that_fit(self.prices, decodes, STEP_SECONDS)
        room.shared = decodes + fit

    def estimate(self, plan: StepPlan) -> Estimate | None:
        """Return the roofline's estimate of a plan. For a plan that decodes as many sequences as
        the last it hardly changes, so it is computed again only every few steps."""
        if self.predict is None:
            return None
        entries, before = len(plan.rows), self._last_estimate
        # The unit of another part is another amount of work: one image is no decoded token.
        decodes = not plan.parts and sum(plan.counts) == entries
        if decodes and before is not None:
            known, number, estimate = before
            if known == entries and 0 < plan.number - number < PREDICTED_FOR:
                return estimate
        estimate = self.predict(plan)
        self._last_estimate = (entries, plan.number, estimate) if decodes else None
        return estimate

    def update(self, plan: StepPlan, result: StepResult, expected: Estimate | None) -> StepStats:
        """Book a step's result; return the statistics after it, without times of the loop."""
        assert result.number == plan.number, f"result {result.number} for step {plan.number}"
        if result.error is None:
            self.failures = 0
            self.told += self.scheduler.update(plan, result)
        elif result.cause == "memory" and self.scheduler.room.halve():
            log.warning("a step found no memory; smaller ones begin it again: %s", result.error)
            self.told += self.scheduler.fail(plan, result.error, again=True)
        else:
            self.failures += 1
            self.told += self.scheduler.fail(plan, result.error)
        self.stats = stats = self.scheduler.stats()
        stats.seconds = result.seconds
        if expected is not None:
            if result.error is None and expected[0] > 0:
                self.slower = max(1.0, 0.99 * self.slower, result.seconds / expected[0])
            stats.predicted_seconds, stats.flops, stats.bytes, stats.launch_seconds = expected
        return stats

    def check_working(self, result: StepResult) -> None:
        """Raise `EngineDead` if a result shows that the worker is broken."""
        if result.cause == "device":
            raise EngineDead(f"the device is lost: {result.error}")
        if self.failures >= FAILED_STEPS:
            raise EngineDead(f"{self.failures} steps failed in a row: {result.error}")

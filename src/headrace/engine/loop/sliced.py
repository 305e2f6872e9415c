"""A lane whose steps are slices of work in numpy: for networks that are no graph (ADR 0059)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Protocol

from ...base.errors import InvalidRequest
from ...base.request import Request, SequenceDelta, StepStats
from ...base.step import PoolShape, StepPlan, StepResult
from ...sched.limits import StepRoom


class SlicedWork(Protocol):
    """Work that stops between slices."""

    @property
    def idle(self) -> bool:
        """Whether there is no slice to compute."""

    def turn(self) -> None:
        """Compute the next slice."""


class SliceWorker:
    """Worker that computes one slice in a step. It has no pool, no grammars and no adapters."""

    def __init__(self, work: SlicedWork) -> None:
        self.work = work

    def allocate(self, pool: PoolShape) -> None:
        """Do nothing."""

    def warm_up(self) -> None:
        """Do nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        self.work.turn()
        seconds = time.perf_counter() - begin
        return StepResult(plan.number, [], seconds=seconds, encoding=seconds)

    def prepare_grammar(
        self, source: str, owner: str = "", done: Callable[[], None] | None = None
    ) -> bool:
        return False

    def load_adapter(self, name: str, path: str) -> None:
        """Do nothing."""

    def unload_adapter(self, name: str) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class SlicePlanner:
    """Control plane of such a lane: while there is work, the next step is a slice of it."""

    max_context = 1
    waiting = 0
    pressure = (0, 0)

    def __init__(self, work: SlicedWork) -> None:
        self.room = StepRoom(1, 1)
        self._work = work
        self._steps = 0
        self._in_flight = False

    @property
    def has_work(self) -> bool:
        return self._in_flight or not self._work.idle

    def add(self, request: Request) -> None:
        raise InvalidRequest("this network takes no requests of text", param="model")

    def abort(self, request_id: str) -> list[SequenceDelta]:
        return []

    def abort_choice(self, request_id: str, choice: int) -> list[SequenceDelta]:
        return []

    def schedule(self) -> StepPlan | None:
        if self._in_flight or self._work.idle:
            return None
        self._in_flight = True
        self._steps += 1
        return StepPlan(self._steps, [], [], [], [])

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        self._in_flight = False
        return []

    def fail(self, plan: StepPlan, message: str, *, again: bool = False) -> list[SequenceDelta]:
        self._in_flight = False
        return []

    def stats(self) -> StepStats:
        return StepStats(self._steps)

    def check_integrity(self) -> None:
        assert not self._in_flight

    def requests(self) -> Iterable[Request]:
        return ()

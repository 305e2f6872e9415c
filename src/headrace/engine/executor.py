"""Executors: where a worker runs. The loop hands one a plan and takes the result when it needs it.

`InlineExecutor` runs the worker in the engine's process: at depth 1 in the loop's own thread, at
depth 2 in a thread of its own, so that the next step is planned while this one computes (kernels
let go of the interpreter lock). `engine.multiproc` runs it in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from ..base.facts import WorkerFacts
from ..base.step import PoolShape, StepPlan, StepResult
from ..dist.wake import Bell, Wake


class StepFuture(Protocol):
    """A result that is coming. `concurrent.futures.Future` is one."""

    def result(self) -> StepResult:
        """Wait for it. Raises `EngineDead` where the worker is gone."""


class Executor(Protocol):
    """One worker, wherever it runs. Calls come in the order load, allocate, warm_up, submit*."""

    @property
    def wake(self) -> Bell:
        """Rings when a grammar that was not ready is, and where the worker dies between steps.
        Clearing it raises `EngineDead` then. To be had from `load` on."""

    def load(self) -> WorkerFacts:
        """Load the weights."""

    def allocate(self, pool: PoolShape) -> None: ...
    def warm_up(self) -> None: ...
    def submit(self, plan: StepPlan) -> StepFuture:
        """Start a step. Steps run in the order of submission."""

    def prepare_grammar(self, source: str, owner: str = "") -> bool:
        """Begin to compile a grammar unless that was begun; is it done? Who waits asks again now
        and then, which says that it is still wanted."""

    def load_adapter(self, name: str, path: str) -> None:
        """Read an adapter, after the steps in flight. Raises what is wrong with it."""

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no sequence has."""

    def close(self) -> None:
        """Give everything back; steps in flight are lost. May be called twice."""


class LoadedWorker(Protocol):
    """What an executor asks of a worker (`worker.Worker` is one)."""

    def allocate(self, pool: PoolShape) -> None: ...
    def warm_up(self) -> None: ...
    def execute(self, plan: StepPlan) -> StepResult: ...
    def prepare_grammar(
        self, source: str, owner: str = "", done: Callable[[], None] | None = None
    ) -> bool:
        """May be called from any thread; only where "grammar" is among the features. Where it
        says no, `done` is called from any thread once asking again is worth it."""

    def load_adapter(self, name: str, path: str) -> None:
        """Only where "adapter" is among the features."""

    def unload_adapter(self, name: str) -> None:
        """Only where "adapter" is among the features."""

    def close(self) -> None: ...


@runtime_checkable
class LaunchingWorker(Protocol):
    """A worker that can start a step before the result of the one before was taken."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]: ...


@runtime_checkable
class StageWorker(Protocol):
    """A worker that has the first layers, and learns what the last ones made of its steps."""

    def learn(self, rows: list[int], places: list[int], tokens: list[list[int]]) -> None: ...


T = TypeVar("T")
LoadWorker = Callable[[], tuple[LoadedWorker, WorkerFacts]]


class InlineExecutor:
    """The worker in this process."""

    def __init__(self, load_worker: LoadWorker, *, threaded: bool = False) -> None:
        self._load_worker = load_worker
        self._worker: LoadedWorker | None = None
        self._wake = Wake()
        # One thread for everything that the worker does: its libraries keep state per thread.
        self._thread = ThreadPoolExecutor(1, "headrace-worker") if threaded else None

    def load(self) -> WorkerFacts:
        def work() -> WorkerFacts:
            self._worker, facts = self._load_worker()
            return facts

        return self._call(work)

    def allocate(self, pool: PoolShape) -> None:
        self._call(lambda: self.worker.allocate(pool))

    def warm_up(self) -> None:
        self._call(lambda: self.worker.warm_up())

    def submit(self, plan: StepPlan) -> StepFuture:
        if self._thread is not None:
            return _Launched(plan, self._thread.submit(launch, self.worker, plan))
        return _Done(execute(self.worker, plan))

    def prepare_grammar(self, source: str, owner: str = "") -> bool:
        return self.worker.prepare_grammar(source, owner, self._wake.ring)

    def load_adapter(self, name: str, path: str) -> None:
        self._call(lambda: self.worker.load_adapter(name, path))

    def unload_adapter(self, name: str) -> None:
        self._call(lambda: self.worker.unload_adapter(name))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._wake.close()

    @property
    def wake(self) -> Wake:
        return self._wake

    @property
    def worker(self) -> LoadedWorker:
        assert self._worker is not None, "load comes first"
        return self._worker

    def _call(self, work: Callable[[], T]) -> T:
        return work() if self._thread is None else self._thread.submit(work).result()


class _Done:
    """A result that is there."""

    __slots__ = ("_result",)

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that the worker's thread launches: the next one need not wait for its result."""

    plan: StepPlan
    finish: Future[Callable[[], StepResult]]

    def result(self) -> StepResult:
        try:
            return self.finish.result()()
        except Exception as fault:  # noqa: BLE001 - the border between the planes
            return _failed(self.plan, fault)


def launch(worker: LoadedWorker, plan: StepPlan) -> Callable[[], StepResult]:
    """Start a step where the worker can; a worker that cannot has done it when this returns."""
    if isinstance(worker, LaunchingWorker):
        return worker.launch(plan)
    result = execute(worker, plan)
    return lambda: result


def execute(worker: LoadedWorker, plan: StepPlan) -> StepResult:
    """One step; what a worker raises becomes the error of the step. A named border."""
    try:
        return worker.execute(plan)
    except Exception as fault:  # noqa: BLE001 - the border between the planes
        return _failed(plan, fault)


def _failed(plan: StepPlan, fault: Exception) -> StepResult:
    message = f"{type(fault).__name__}: {fault}"
    return StepResult(plan.number, [[] for _ in plan.rows], error=message[:2000])

"""Executors: places for a worker to run. The loop gives one a plan and takes the result when
needed.

`InlineExecutor` runs the worker in the engine's process: at depth 1 in the loop's own thread, at
depth 2 in a thread of its own. Then the next step is planned while this one computes (kernels
release the interpreter lock). `engine.ranks.multiproc` runs it in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from ...base.facts import WorkerFacts
from ...base.step import PoolShape, StepPlan, StepResult
from ...dist.wake import Bell, Wake


class StepFuture(Protocol):
    """A result that is coming. `concurrent.futures.Future` is one."""

    def result(self) -> StepResult:
        """Wait for it. Raises `EngineDead` if the worker is gone."""


class Executor(Protocol):
    """One worker, in any place. Calls come in the order load, allocate, warm_up, submit*."""

    @property
    def wake(self) -> Bell:
        """A bell that rings when a grammar becomes ready, and when the worker dies between steps.
        In the latter case clearing it raises `EngineDead`. Available from `load` on."""

    def load(self) -> WorkerFacts:
        """Load the weights."""

    def allocate(self, pool: PoolShape) -> None: ...
    def warm_up(self) -> None: ...
    def submit(self, plan: StepPlan) -> StepFuture:
        """Start a step. Steps run in the order of submission."""

    def prepare_grammar(self, source: str, owner: str = "") -> bool:
        """Begin to compile a grammar unless that has begun; return whether it is done. A waiting
        caller asks again now and then, which says that it is still wanted."""

    def load_adapter(self, name: str, path: str) -> None:
        """Read an adapter, after the steps in flight. Raises the errors of its files."""

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no sequence has."""

    def close(self) -> None:
        """Give everything back; steps in flight are lost. May be called twice."""


class LoadedWorker(Protocol):
    """The interface of a worker that an executor needs (`worker.Worker` is one)."""

    def allocate(self, pool: PoolShape) -> None: ...
    def warm_up(self) -> None: ...
    def execute(self, plan: StepPlan) -> StepResult: ...
    def prepare_grammar(
        self, source: str, owner: str = "", done: Callable[[], None] | None = None
    ) -> bool:
        """Compile a grammar; return whether it is ready. May be called from any thread; only with
        "grammar" among the features. After a False, `done` is called from any thread once asking
        again is worth it."""

    def load_adapter(self, name: str, path: str) -> None:
        """Only with "adapter" among the features."""

    def unload_adapter(self, name: str) -> None:
        """Only with "adapter" among the features."""

    def close(self) -> None: ...


@runtime_checkable
class LaunchingWorker(Protocol):
    """A worker that can start a step before the previous step's result was taken."""

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]: ...


@runtime_checkable
class StageWorker(Protocol):
    """A worker with the first layers, which learns the tokens that the last stage sampled."""

    def learn(self, rows: list[int], places: list[int], tokens: list[list[int]]) -> None: ...


T = TypeVar("T")
LoadWorker = Callable[[], tuple[LoadedWorker, WorkerFacts]]


class InlineExecutor:
    """An executor with the worker in this process."""

    def __init__(
        self,
        load_worker: LoadWorker,
        *,
        threaded: bool = False,
        beside: InlineExecutor | None = None,
        aside: bool = False,
    ) -> None:
        """`beside`: the executor of another model, whose thread and bell serve this one too.
        `aside`: `load` runs in the caller's thread, while that model computes."""
        self._load_worker = load_worker
        self._aside = aside
        self._worker: LoadedWorker | None = None
        self._users: list[int] = [0] if beside is None else beside._users
        """Number of executors that share thread and bell: the last one closes them."""
        self._users[0] += 1
        self._wake: Wake = Wake() if beside is None else beside._wake
        # One thread for everything that the worker does: its libraries keep state per thread.
        self._thread: ThreadPoolExecutor | None = None
        if beside is not None:
            self._thread = beside._thread
        elif threaded:
            self._thread = ThreadPoolExecutor(1, "headrace-worker")
        self._closed = False

    def load(self) -> WorkerFacts:
        def work() -> WorkerFacts:
            self._worker, facts = self._load_worker()
            return facts

        return work() if self._aside else self._call(work)

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
        if self._closed:
            return
        self._closed = True
        self._users[0] -= 1
        last = not self._users[0]
        if self._thread is not None and last:
            self._thread.shutdown(wait=True, cancel_futures=True)
        if self._worker is not None:
            worker, self._worker = self._worker, None
            worker.close() if last else self._call(worker.close)
        if last:
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
        except Exception as fault:  # noqa: BLE001 - the boundary between the planes
            return _failed(self.plan, fault)


def launch(worker: LoadedWorker, plan: StepPlan) -> Callable[[], StepResult]:
    """Start a step if the worker can; a worker that cannot has done it when this returns."""
    if isinstance(worker, LaunchingWorker):
        return worker.launch(plan)
    result = execute(worker, plan)
    return lambda: result


def execute(worker: LoadedWorker, plan: StepPlan) -> StepResult:
    """Run one step; an exception of the worker becomes the error of the step. A named boundary."""
    try:
        return worker.execute(plan)
    except Exception as fault:  # noqa: BLE001 - the boundary between the planes
        return _failed(plan, fault)


def _failed(plan: StepPlan, fault: Exception) -> StepResult:
    message = f"{type(fault).__name__}: {fault}"
    return StepResult(plan.number, [[] for _ in plan.rows], error=message[:2000])

"""The loop by itself, with the real scheduler and a fake worker, and no process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from engine_fakes import RAISE, FakeWorker, continuation

from headrace.base.errors import EngineDead, Overloaded
from headrace.base.facts import WorkerFacts
from headrace.base.request import Request, SequenceDelta
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import GroupShape, PoolShape, StepPlan, StepResult
from headrace.engine.loop.core import EngineCore
from headrace.engine.loop.executor import InlineExecutor, StepFuture
from headrace.engine.loop.lane import FAILED_STEPS, PREDICTED_FOR
from headrace.kv import KvManager
from headrace.roofline.step import Estimate
from headrace.sched import Limits, Scheduler

POOL = PoolShape(8, (GroupShape("full", (0,), None, 60),))


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


MADE: list[InlineExecutor] = []


@pytest.fixture(autouse=True)
def closed_executors() -> Iterator[None]:
    yield
    while MADE:
        MADE.pop().close()


class LateExecutor(InlineExecutor):
    """Runs a step only when its result is asked for: what is in flight can be seen."""

    def __init__(self, worker: FakeWorker, clock: Clock) -> None:
        super().__init__(lambda: (worker, WorkerFacts(0, 0)))
        MADE.append(self)
        self.load()
        self.allocate(POOL)
        self.clock = clock
        self.in_flight = 0
        self.most = 0

    def submit(self, plan: StepPlan) -> StepFuture:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        executor = self

        class Late:
            def result(self) -> StepResult:
                executor.clock.now += 1.0
                executor.in_flight -= 1
                return InlineExecutor.submit(executor, plan).result()

        return Late()


def make(
    depth: int = 1, predict: Callable[[StepPlan], Estimate] | None = None, **limits: int
) -> tuple[EngineCore, LateExecutor, Clock]:
    clock = Clock()
    bounds = {"rows": 8, "step_tokens": 32, "max_context": 200, "max_waiting": 100} | limits
    scheduler = Scheduler(Limits(**bounds, depth=depth), KvManager(POOL), clock=clock)  # type: ignore[arg-type]
    executor = LateExecutor(FakeWorker(), clock)
    core = EngineCore(scheduler, executor, depth=depth, check=True, predict=predict, clock=clock)
    return core, executor, clock


def request(name: str, prompt: list[int], tokens: int, n: int = 1) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, n=n)
    return Request(name, prompt, RequestSpec(sampling, 0), arrival=100.0)


def run(core: EngineCore) -> list[SequenceDelta]:
    deltas = []
    while core.has_work:
        deltas += core.turn()
    return deltas


def tokens_of(deltas: list[SequenceDelta], name: str, choice: int = 0) -> list[int]:
    return [
        token for d in deltas if (d.request_id, d.choice) == (name, choice) for token in d.tokens
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_is_answered_at_every_depth(depth: int) -> None:
    core, executor, _ = make(depth)
    random.seed(5)
    wanted = {}
    for place in range(60):
        prompt = [random.randrange(256) for _ in range(random.randrange(1, 60))]
        wanted[str(place)] = (prompt, random.randrange(1, 30))
        core.add(request(str(place), *wanted[str(place)]))
    deltas = run(core)
    for name, (prompt, count) in wanted.items():
        assert tokens_of(deltas, name) == continuation(prompt, count)
        assert [d.finish for d in deltas if d.request_id == name and d.finish] == ["length"]
    assert executor.most == depth
    assert core.turn() == []


def test_aborts_are_told_with_the_next_turn() -> None:
    core, _, _ = make()
    core.add(request("a", [1, 2], 50, n=2))
    core.add(request("b", [1, 2], 5))
    core.turn()
    core.abort_choice("a", 1)
    core.abort("b")
    core.abort("unknown")
    deltas = core.turn()
    assert {(d.request_id, d.choice) for d in deltas if d.finish} == {("a", 1), ("b", 0)}
    core.abort("a")
    assert core.has_work, "the end of a request is still to be told"
    assert [(d.request_id, d.finish) for d in run(core)] == [("a", "abort")]
    assert (core.stats.running, core.stats.waiting, core.stats.kv_usage) == (0, 0, 0.0)


def test_a_step_carries_its_prediction() -> None:
    core, _, _ = make(predict=lambda plan: Estimate(0.5, 10.0 * plan.tokens, 7.0, 0.1))
    core.add(request("a", [1, 2, 3], 2))
    core.turn()
    assert (core.stats.predicted_seconds, core.stats.flops, core.stats.bytes) == (0.5, 30.0, 7.0)
    assert core.stats.launch_seconds == 0.1


def test_decoding_steps_are_predicted_again_only_now_and_then() -> None:
    asked: list[tuple[int, int]] = []

    def predict(plan: StepPlan) -> Estimate:
        asked.append((plan.number, plan.tokens))
        return Estimate(float(plan.number), 0.0, 0.0)

    core, _, _ = make(predict=predict)
    core.add(request("a", [1, 2, 3], 2 * PREDICTED_FOR + 10))
    for _ in range(5):
        core.turn()
    assert core.stats.predicted_seconds == 1.0, "of the first step that only decoded"
    core.add(request("b", [1, 2], 40))
    run(core)
    # Prompts, each first decode after one, then every so many steps, and when one has ended.
    assert asked[:4] == [(0, 3), (1, 1), (5, 3), (6, 2)]
    assert asked[4] == (6 + PREDICTED_FOR, 2)
    assert len(asked) < 10


def test_times_of_a_step() -> None:
    core, _executor, clock = make()
    core.add(request("a", [1], 3))
    core.turn()
    assert core.stats.idle_seconds == 0.0, "the first step follows no other"
    clock.now += 0.25
    core.turn()
    assert core.stats.idle_seconds == 0.25
    assert core.stats.seconds == 0.001
    assert (core.stats.entries, core.stats.sampled_tokens) == (1, 1)
    run(core)
    clock.now += 50.0
    core.add(request("b", [1], 2))
    core.turn()
    assert core.stats.idle_seconds == 0.0, "time without work is nobody's idleness"


def test_a_refusal_changes_nothing() -> None:
    core, _, _ = make(max_waiting=1)
    for place in range(9):
        core.add(request(str(place), [1, 2], 3))
    with pytest.raises(Overloaded):
        core.add(request("over", [1, 2], 3))
    assert {d.request_id for d in run(core)} == {str(place) for place in range(9)}


def test_a_failed_step_ends_its_own_and_three_in_a_row_end_the_worker() -> None:
    core, _, _ = make()
    for place in range(FAILED_STEPS - 1):
        core.add(request(f"bad{place}", [1, RAISE], 5))
        (delta,) = run(core)
        assert (delta.finish, delta.error) == ("error", "RuntimeError: the fake raises")
    core.add(request("good", [1, 2], 5))
    assert tokens_of(run(core), "good") == continuation([1, 2], 5)
    for place in range(FAILED_STEPS):
        core.add(request(f"worse{place}", [1, RAISE], 5))
        if place < FAILED_STEPS - 1:
            run(core)
    with pytest.raises(EngineDead, match="3 steps failed in a row"):
        run(core)
    with pytest.raises(EngineDead, match="3 steps failed in a row"):
        core.turn()


class _Narrow(FakeWorker):
    """Has memory for steps of so many tokens."""

    room, cause = 300, "memory"

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.tokens <= self.room:
            return super().execute(plan)
        result = StepResult(plan.number, [[] for _ in plan.rows], error="out of memory")
        result.cause = self.cause
        return result


def on_narrow(worker: _Narrow, depth: int) -> EngineCore:
    clock = Clock()
    limits = Limits(rows=8, step_tokens=1024, max_context=200, max_waiting=100, depth=depth)
    scheduler = Scheduler(limits, KvManager(POOL), clock=clock)
    return EngineCore(scheduler, LateExecutor(worker, clock), depth=depth, check=True, clock=clock)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_without_memory_starts_again_in_smaller_ones(depth: int) -> None:
    worker = _Narrow()
    core = on_narrow(worker, depth)
    random.seed(6)
    wanted = {str(n): [random.randrange(256) for _ in range(90)] for n in range(6)}
    for name, prompt in wanted.items():
        core.add(request(name, prompt, 9))
    deltas = run(core)
    for name, prompt in wanted.items():
        assert tokens_of(deltas, name) == continuation(prompt, 9)
    assert not any(delta.error for delta in deltas)
    # What follows begins with the smaller steps.
    core.add(request("next", [1] * 90, 2))
    assert not any(delta.preemptions for delta in run(core))


def test_a_step_that_cannot_be_smaller_fails() -> None:
    worker = _Narrow()
    worker.room = 5
    core = on_narrow(worker, 1)
    core.add(request("one", [1] * 30, 2))
    deltas = run(core)
    assert [(delta.finish, delta.error) for delta in deltas] == [("error", "out of memory")]


def test_a_lost_device_ends_the_worker_at_once() -> None:
    worker = _Narrow()
    worker.room, worker.cause = 20, "device"
    core = on_narrow(worker, 2)
    core.add(request("one", [1] * 30, 2))
    with pytest.raises(EngineDead, match="the device is lost: out of memory"):
        run(core)


def test_a_sequence_without_finite_numbers_ends_alone() -> None:
    class Spoils(FakeWorker):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            if len(plan.rows) > 1:
                result.tokens[1], result.spoiled[1] = [], "not finite"
            return result

    core = on_narrow(Spoils(), 1)  # type: ignore[arg-type]
    for name in "ab":
        core.add(request(name, [1, 2], 4))
    deltas = run(core)
    assert tokens_of(deltas, "a") == continuation([1, 2], 4)
    assert tokens_of(deltas, "b") == []
    (ended,) = [delta for delta in deltas if delta.error]
    assert (ended.request_id, ended.error, ended.error_status) == ("b", "not finite", 500)


def test_a_result_for_another_step_is_a_bug() -> None:
    core, executor, _ = make()
    wrong: Future[StepResult] = Future()
    wrong.set_result(StepResult(99, [[1]]))
    executor.submit = lambda plan: wrong  # type: ignore[method-assign]
    core.add(request("a", [1], 3))
    with pytest.raises(AssertionError, match="result 99 for step 0"):
        core.turn()

"""Several models in one loop: whose step is next, and whose answer is whose."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from engine_fakes import RAISE, FakeWorker, continuation
from test_core import POOL, Clock, LateExecutor, closed_executors, request, tokens_of

from headrace.base.encodings import EncoderShape, SealedHandle
from headrace.base.errors import EngineDead
from headrace.base.request import SequenceDelta
from headrace.base.spec import InputSpan
from headrace.base.step import StepPlan, StepResult
from headrace.engine.loop.core import EngineCore
from headrace.engine.loop.executor import StepFuture
from headrace.engine.loop.lane import Lane
from headrace.kv import KvManager
from headrace.obs.flight import FlightRecorder
from headrace.sched import Limits, Scheduler
from headrace.sched.encodings import Encodings
from headrace.sched.price import MixedPrices

assert closed_executors  # A fixture that closes what `make` opens.


class Noted(LateExecutor):
    """Writes down the plans that pass."""

    def __init__(self, name: int, clock: Clock, log: list[tuple[int, StepPlan]]) -> None:
        super().__init__(FakeWorker(), clock)
        self.name, self.log = name, log

    def submit(self, plan: StepPlan) -> StepFuture:
        self.log.append((self.name, plan))
        late = super().submit(plan)

        class Timed:
            def result(self) -> StepResult:
                return replace(late.result(), seconds=1.0)

        return Timed()


def make(
    depth: int = 1, models: int = 2, weights: tuple[float, ...] = ()
) -> tuple[EngineCore, list[tuple[int, StepPlan]]]:
    clock, log = Clock(), list[tuple[int, StepPlan]]()
    limits = Limits(rows=8, step_tokens=32, max_context=200, max_waiting=100, depth=depth)

    def parts(number: int) -> tuple[Scheduler, Noted]:
        return Scheduler(limits, KvManager(POOL), clock=clock), Noted(number, clock, log)

    recorder = FlightRecorder(records=64)
    core = EngineCore(*parts(0), depth=depth, check=True, clock=clock, flight=recorder)
    for number in range(1, models):
        weight = weights[number] if weights else 1.0
        core.join(number, Lane(*parts(number)), weight)
    return core, log


def run(core: EngineCore) -> dict[int, list[SequenceDelta]]:
    deltas: dict[int, list[SequenceDelta]] = {model: [] for model in core.lanes}
    while core.has_work:
        for told in core.step():
            deltas[told.model] += told.deltas
    return deltas


def run_each(core: EngineCore) -> None:
    """Run to the end; the fake of model 1 fails each step."""
    while core.has_work:
        core.step()
        if not core.lanes[1].has_work:
            core.add(request("bad again", [RAISE], 5), 1)


@pytest.mark.parametrize("depth", [1, 2])
def test_each_model_answers_its_requests(depth: int) -> None:
    """Ids that two models have in common are of different requests."""
    core, log = make(depth, models=3)
    random.seed(5)
    wanted = {}
    for place in range(60):
        prompt = [random.randrange(256) for _ in range(random.randrange(1, 60))]
        wanted[place % 3, str(place // 3)] = prompt, random.randrange(1, 30)
    for (model, name), one in wanted.items():
        core.add(request(name, *one), model)
    deltas = run(core)
    for (model, name), (prompt, count) in wanted.items():
        mine = deltas[model]
        assert tokens_of(mine, name) == continuation(prompt, count)
        assert [d.finish for d in mine if d.request_id == name and d.finish] == ["length"]
    assert {model for model, _ in log} == {0, 1, 2}
    assert core.step() == []


def test_steps_alternate_while_several_have_work() -> None:
    core, log = make()
    core.add(request("a", [1, 2], 20))
    core.add(request("a", [1, 2], 20), 1)
    run(core)
    assert [model for model, _ in log[:20]] == [0, 1] * 10


def test_a_weight_is_a_share_of_the_steps() -> None:
    core, log = make(weights=(1.0, 3.0))
    core.add(request("a", [1, 2], 60))
    core.add(request("a", [1, 2], 60), 1)
    run(core)
    first = [model for model, _ in log[:60]]
    assert 13 <= first.count(0) <= 17


def test_prompts_come_in_small_steps_while_another_model_has_work() -> None:
    """The fake takes a second a step, whatever is in it: no step is short enough for more than the
    fewest tokens."""
    core, log = make()
    core.add(request("a", [1] * 100, 2))
    core.add(request("b", [1, 2], 40), 1)
    run(core)
    assert [plan.tokens for model, plan in log if model == 0][:6] == [32, 16, 16, 16, 16, 4]
    core.add(request("c", [3] * 100, 2))
    before = len(log)
    run(core)
    assert [plan.tokens for _, plan in log[before : before + 3]] == [32, 32, 32], "it is alone"


def test_aborts_are_told_of_the_right_model() -> None:
    core, _ = make()
    core.add(request("a", [1, 2], 50))
    core.add(request("a", [1, 2], 5), 1)
    core.step()
    core.abort("a", 1)
    told = core.step()
    assert [(one.model, d.finish) for one in told for d in one.deltas if d.finish] == [(1, "abort")]
    assert core.lanes[1].stats.running == 0
    assert core.has_work, "the other one goes on"
    core.abort("a")
    run(core)


def test_a_model_whose_steps_fail_ends_its_own_requests() -> None:
    core, _ = make()
    core.add(request("bad", [RAISE], 5), 1)
    core.add(request("good", [1, 2], 10))
    deltas = run(core)
    assert [d.finish for d in deltas[1]] == ["error"]
    assert tokens_of(deltas[0], "good") == continuation([1, 2], 10)
    core.add(request("good", [1, 2], 60))
    core.add(request("bad again", [RAISE], 5), 1)
    with pytest.raises(EngineDead, match="failed in a row"):
        run_each(core)


def test_a_model_leaves_and_another_comes() -> None:
    core, log = make()
    core.add(request("a", [1, 2], 5), 1)
    run(core)
    lane = core.leave(1)
    core.join(2, lane)
    core.add(request("b", [3, 4], 5), 2)
    assert tokens_of(run(core)[2], "b") == continuation([3, 4], 5)
    assert len(core.lanes) == 2
    assert log


class EncodingWorker(FakeWorker):
    """Has an encoder, whose slices do nothing; text is as of the fake."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan.first_part())
        result.tokens += [[] for _ in plan.rows[plan.texts :]]
        return replace(result, seconds=0.5, encoding=0.5 if plan.parts else 0.0)


@pytest.mark.parametrize("other", [0, 5])
def test_a_step_may_only_encode(other: int) -> None:
    """A picture or a sound at the start of a prompt: no token of text is computed with it."""
    core, _ = make()
    limits = Limits(rows=8, step_tokens=32, max_context=200, max_waiting=100)
    prices = MixedPrices(lambda tokens: 1e-3 * tokens, lambda units: 1.0 * units)
    encodings = Encodings(EncoderShape(slices=5, width=1, bound=160), prices)
    executor = LateExecutor(EncodingWorker(), Clock())
    core.join(2, Lane(Scheduler(limits, KvManager(POOL), encodings=encodings), executor))
    seen = request("seen", [1, 2, 3, 4, 5, 6], 4)
    span = InputSpan(0, 4, "sound", b"d", SealedHandle(0, 0, b"name", 1, 1), units=4)
    seen.spec = replace(seen.spec, inputs=(span,))
    core.add(seen, 2)
    if other:
        core.add(request("a", [1, 2], other), 1)
    found = run(core)
    assert tokens_of(found[2], "seen") == continuation([1, 2, 3, 4, 5, 6], 4)
    assert len(tokens_of(found[1], "a")) == other


def test_the_last_model_has_its_full_steps_again() -> None:
    """The other one left while it was the last to have had a small step."""
    core, _ = make()
    core.add(request("a", [1] * 100, 2))
    core.add(request("b", [1, 2], 2), 1)
    while core.lanes[1].has_work:
        core.step()
    assert core.first.scheduler.room.shared is not None
    core.leave(1)
    assert core.first.scheduler.room.shared is None
    run(core)


def test_the_flight_recorder_says_whose_steps_they_were() -> None:
    core, log = make()
    core.add(request("a", [1, 2], 5))
    core.add(request("a", [1, 2], 5), 1)
    run(core)
    steps = core._flight.read()
    assert [(step.get("model", 0), step["step"]) for step in steps] == [
        (model, plan.number) for model, plan in log
    ]

"""Operator requests to the engine's loop: their answers, and their ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.base.errors import DoesNotFit, EngineDead
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, GroupShape, PoolShape, StepPlan, StepResult
from headrace.engine.loop import controls
from headrace.engine.loop.controls import Controls
from headrace.engine.messages import Operate
from headrace.loader import open_model
from headrace.roofline.hardware import DEVICES

POOL = PoolShape(8, (GroupShape("full", (0,), None, 60),))


class Executor:
    """Computes nothing. `fault` is raised by `allocate`."""

    fault: Exception | None = None

    def allocate(self, pool: PoolShape) -> None:
        if self.fault is not None:
            raise self.fault

    def submit(self, plan: StepPlan) -> Any:
        return SimpleNamespace(result=lambda: StepResult(plan.number, [], seconds=1e-3))


@pytest.fixture
def make(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Controls, Any]]:
    def made() -> tuple[Controls, Any]:
        core = SimpleNamespace(executor=Executor())
        memory = SimpleNamespace(pool=POOL, kv_bytes=1)
        built: Any = SimpleNamespace(core=core, memory=memory, decisions=[])
        return Controls(built, open_model(str(tiny))), core

    monkeypatch.setattr(controls, "this_hardware", lambda device: DEVICES["H100"])
    return made


def test_a_recording_is_bounded_by_what_is_drawn_of_it(
    make: Callable[[], tuple[Controls, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, spec = list(range(64)), RequestSpec(SamplingParams(), 0)
    monkeypatch.setattr(controls, "MOST_ENTRIES", 1000)
    it, core = make()
    plain = core.executor
    assert it.perform(Operate(1, "start_profile")).error is None
    for number in range(20):
        admitted = [Admission(row, row, [1], 1, 0, spec) for row in rows]
        counts, samples = [1] * 64, [True] * 64
        plan = StepPlan(number, rows, [number] * 64, counts, samples, [] if number else admitted)
        assert core.executor.submit(plan).result().number == number
    path = tmp_path / "profiles" / "timeline.json"
    answer = it.perform(Operate(2, "stop_profile", str(path)))
    assert answer.error is None
    assert answer.facts == {"steps": 13, "left_out": 7}, "13 x (64 + 16) is over 1000"
    assert core.executor is plain
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) <= 13 * (64 + 16)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert "engine (7 later steps left out)" in names


def test_a_refusal_is_answered_and_a_dead_worker_ends_the_loop(
    make: Callable[[], tuple[Controls, Any]],
) -> None:
    it, core = make()
    it.asleep = True
    core.executor.fault = DoesNotFit("others took the memory")
    answer = it.perform(Operate(1, "wake"))
    assert answer.error is not None
    assert answer.error.kind == "DoesNotFit"
    assert it.asleep, "it can be asked again"
    core.executor.fault = EngineDead("the worker process was ended by SIGKILL")
    with pytest.raises(EngineDead):
        it.perform(Operate(2, "wake"))

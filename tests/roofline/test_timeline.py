"""Recorded steps: nothing is lost on the way, and the timeline is what Perfetto reads."""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from pathlib import Path

from headrace.base.sampling import SamplingParams
from headrace.base.step import Admission, PoolShape, StepPlan, StepResult
from headrace.engine.recording import RecordingExecutor, compositions, step_lines, timeline
from headrace.roofline.counts import Case
from headrace.roofline.fit import read_records
from headrace.roofline.hardware import DEVICES
from headrace.roofline.step import StepModel

from .archs import QWEN_05B


class Instant:
    """An executor whose steps take a set time."""

    def allocate(self, pool: PoolShape) -> None:
        self.pool = pool

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        done: Future[StepResult] = Future()
        done.set_result(StepResult(plan.number, [[1] for _ in plan.rows], seconds=0.004))
        return done


def test_steps_are_kept_and_drawn(tmp_path: Path) -> None:
    recorder = RecordingExecutor(Instant())  # type: ignore[arg-type]
    recorder.allocate(PoolShape(16, ()))
    sampling = SamplingParams()
    plans = [
        StepPlan(0, [3], [0], [40], [True], [Admission(3, 77, [1] * 40, 40, sampling)]),
        StepPlan(1, [3, 5], [40, 0], [1, 20], [True, True],
                 [Admission(5, 78, [1] * 20, 20, sampling)]),
    ]  # fmt: skip
    for plan in plans:
        time.sleep(0.005)
        assert recorder.submit(plan).result().number == plan.number
    assert [step.sequences for step in recorder.steps] == [{3: 77}, {3: 77, 5: 78}]
    model = StepModel(Case(QWEN_05B), DEVICES["H100"])
    drawn = json.loads(json.dumps(timeline(recorder.steps, compositions(model), model)))
    events = drawn["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= -4000 for event in spans)
    device = [event for event in spans if event["pid"] == 1 and event["tid"] == 2]
    assert [event["name"] for event in device] == ["prefill", "mixed"]
    assert all(event["dur"] == 4000 for event in device)
    assert device[0]["ts"] + device[0]["dur"] <= device[1]["ts"] + 1
    operators = [event for event in spans if event["pid"] == 1 and event["tid"] == 3]
    assert {"linear qkv", "attention attention", "logits head"} <= {e["name"] for e in operators}
    assert {event["args"]["bound"] for event in operators} <= {"compute", "memory", "launch"}
    assert sorted(event["tid"] for event in spans if event["pid"] == 2) == [77, 77, 78]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, step_lines(recorder.steps))))
    records = read_records(path)
    assert [record.counts for record in records] == [[40], [1, 20]]
    assert records[0].seconds == 0.004

"""Recorded steps: nothing is lost on the way, and the timeline is what Perfetto reads."""

from __future__ import annotations

import itertools
import json
import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, PoolShape, StepPlan, StepResult
from headrace.engine.loop.recording import RecordedStep, RecordingExecutor, step_lines
from headrace.engine.loop.timeline import timeline
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


def verify(drawn: dict[str, Any]) -> None:
    """The Trace Event Format, and what Perfetto asks of it: slices of a track nest or are apart."""
    assert set(drawn) == {"traceEvents", "displayTimeUnit"}
    assert drawn["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[int, int]] = set()
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in drawn["traceEvents"]:
        key = event["pid"], event["tid"]
        assert all(isinstance(part, int) for part in key)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
            named.add(key if event["name"] == "thread_name" else (event["pid"], 0))
            continue
        assert event["ph"] == "X"
        assert event["name"]
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        tracks.setdefault(key, []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(tracks) <= named, "every track has a name"
    for spans in tracks.values():
        for (_, end), (begin, _) in itertools.pairwise(sorted(spans)):
            assert begin >= end - 0.002, "slices of a track overlap"


def test_overlapping_steps_are_drawn_apart() -> None:
    """Two steps in flight, results taken late, predictions far longer than the steps."""
    spec = RequestSpec(SamplingParams(), 0)
    admission = Admission(0, 7, [1] * 600, 600, 0, spec)
    steps = [
        RecordedStep(StepPlan(0, [0], [0], [600], [True], [admission]), 0.0, 0.011, 0.001, {0: 7}),
        RecordedStep(StepPlan(1, [0], [600], [1], [True]), 0.001, 0.0115, 0.001, {0: 7}),
        RecordedStep(StepPlan(2, [0], [601], [1], [True]), 0.0112, 0.012, 0.001, {0: 7}),
    ]
    slow = replace(DEVICES["THOR"], bandwidth=1e9)
    drawn = timeline(steps, StepModel(Case(QWEN_05B), slow))
    verify(json.loads(json.dumps(drawn)))
    operators = [
        event for event in drawn["traceEvents"] if event.get("tid") == 4 and event["ph"] == "X"
    ]
    shortened = [event for event in operators if event["dur"] < event["args"]["predicted_us"] * 0.9]
    assert shortened
    assert timeline([], StepModel(Case(QWEN_05B), slow))["traceEvents"]


def test_steps_are_kept_and_drawn(tmp_path: Path) -> None:
    recorder = RecordingExecutor(Instant())  # type: ignore[arg-type]
    recorder.allocate(PoolShape(16, ()))
    spec = RequestSpec(SamplingParams(), 0)
    plans = [
        StepPlan(0, [3], [0], [40], [True], [Admission(3, 77, [1] * 40, 40, 0, spec)]),
        StepPlan(
            1, [3, 5], [40, 0], [1, 20], [True, True], [Admission(5, 78, [1] * 20, 20, 0, spec)]
        ),
    ]
    for plan in plans:
        time.sleep(0.005)
        assert recorder.submit(plan).result().number == plan.number
    assert [step.sequences for step in recorder.steps] == [{3: 77}, {3: 77, 5: 78}]
    model = StepModel(Case(QWEN_05B), DEVICES["H100"])
    drawn = json.loads(json.dumps(timeline(recorder.steps, model)))
    events = drawn["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    verify(drawn)
    device = [event for event in spans if event["pid"] == 1 and event["tid"] == 3]
    assert [event["name"] for event in device] == ["prefill", "mixed"]
    assert all(event["dur"] == 4000 for event in device)
    assert device[0]["ts"] + device[0]["dur"] <= device[1]["ts"] + 1
    operators = [event for event in spans if event["pid"] == 1 and event["tid"] == 4]
    assert {"linear qkv", "attend attention", "linear head"} <= {e["name"] for e in operators}
    assert {event["args"]["bound"] for event in operators} <= {"compute", "memory", "launch"}
    assert sorted(event["tid"] for event in spans if event["pid"] == 2) == [77, 77, 78]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, step_lines(recorder.steps))))
    records = read_records(path)
    assert [record.counts for record in records] == [[40], [1, 20]]
    assert records[0].seconds == 0.004

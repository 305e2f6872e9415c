"""An executor that remembers its steps, and the timeline that Perfetto draws of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.step import StepPlan, StepResult
from ..roofline.composition import Composition, compose_plan
from ..roofline.step import StepModel
from .executor import Executor, StepFuture


@dataclass(slots=True)
class RecordedStep:
    """One step as it ran; times of `time.perf_counter`."""

    plan: StepPlan
    submitted: float
    ended: float = 0.0
    device_seconds: float = 0.0
    sequences: dict[int, int] = field(default_factory=dict)
    """Row → sequence, of the rows that computed."""


class _Watched:
    """A result that notes when it was taken."""

    def __init__(self, future: StepFuture, step: RecordedStep) -> None:
        self._future, self._step = future, step

    def result(self) -> StepResult:
        result = self._future.result()
        self._step.ended = time.perf_counter()
        self._step.device_seconds = result.seconds
        return result


class RecordingExecutor:
    """Stands before a loaded executor and keeps every step that passes."""

    def __init__(self, inner: Executor, *, most: int | None = None) -> None:
        """`most`: steps that are kept; later ones only pass."""
        self._inner = inner
        self._most = most
        self._rows: dict[int, int] = {}
        self.steps: list[RecordedStep] = []

    def submit(self, plan: StepPlan) -> StepFuture:
        self._rows.update({one.row: one.sequence_id for one in plan.admitted})
        step = RecordedStep(
            plan, time.perf_counter(), sequences={row: self._rows.get(row, -1) for row in plan.rows}
        )
        if self._most is None or len(self.steps) < self._most:
            self.steps.append(step)
        return _Watched(self._inner.submit(plan), step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def timeline(
    steps: Sequence[RecordedStep], arch_step: Callable[[StepPlan], Composition], model: StepModel
) -> dict[str, Any]:
    """Chrome trace events: the loop, the device, the roofline's operators, and each sequence.

    The operators are where the roofline expects them, from the start of their step; their sum next
    to the step as it was measured shows what is missing.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for tid, name in ((1, "engine loop"), (2, "device, measured"), (3, "roofline, predicted"))
    ]
    named: set[int] = set()
    origin = steps[0].submitted if steps else 0.0

    def add(tid: int, name: str, begin: float, seconds: float, **arguments: Any) -> None:
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": tid,
                "name": name,
                "args": arguments,
                "ts": round((begin - origin) * 1e6, 3),
                "dur": round(seconds * 1e6, 3),
            }
        )

    for step in steps:
        plan, begin = step.plan, step.ended - step.device_seconds
        composition = arch_step(plan)
        predicted = model.time(composition)
        about = {
            "entries": len(plan.rows), "tokens": plan.tokens,
            "predicted_ms": predicted.seconds * 1e3, "limit_ms": predicted.limit_seconds * 1e3,
            "ratio": predicted.seconds / step.device_seconds if step.device_seconds else None,
            "bound": predicted.bound,
        }  # fmt: skip
        add(1, f"step {plan.number}", step.submitted, step.ended - step.submitted, **about)
        add(2, composition.kind, begin, step.device_seconds, **about)
        at = begin
        for operator in predicted.operators:
            add(
                3, f"{operator.count.operator} {operator.count.label}", at, operator.seconds,
                bound=operator.bound, calls=operator.count.calls,
                gflop=operator.count.flops * operator.count.calls / 1e9,
                mbytes=operator.count.bytes * operator.count.calls / 1e6,
                limit_us=operator.limit_seconds * 1e6,
            )  # fmt: skip
            at += operator.seconds
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            sequence = step.sequences.get(row, -1)
            if sequence not in named:
                named.add(sequence)
                events.append(
                    {"ph": "M", "pid": 2, "tid": sequence, "name": "thread_name",
                     "args": {"name": f"sequence {sequence}"}}
                )  # fmt: skip
            name = f"decode at {start}" if count == 1 and start else f"{count} tokens from {start}"
            events.append(
                {"ph": "X", "pid": 2, "tid": sequence, "name": name,
                 "ts": round((begin - origin) * 1e6, 3),
                 "dur": round(step.device_seconds * 1e6, 3), "args": {"row": row}}
            )  # fmt: skip
    events.append({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "engine"}})
    events.append({"ph": "M", "pid": 2, "name": "process_name", "args": {"name": "sequences"}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def step_lines(steps: Sequence[RecordedStep]) -> list[dict[str, Any]]:
    """Step records as `roofline.fit.read_records` reads them, one JSON object per step."""
    return [
        {
            "starts": step.plan.starts, "counts": step.plan.counts,
            "samples": sum(step.plan.samples), "seconds": step.device_seconds,
        }
        for step in steps
        if step.device_seconds > 0
    ]  # fmt: skip


def compositions(model: StepModel) -> Callable[[StepPlan], Composition]:
    return lambda plan: compose_plan(model.case.arch, plan)

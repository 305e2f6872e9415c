"""An executor that remembers its steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base.step import StepPlan, StepResult
from .executor import Executor, StepFuture

STEP_ENTRIES = 16
"""Entries of a step in a recording, in addition to its rows: about as many operators are drawn for
it."""


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
        self._step.device_seconds = result.seconds - result.encoding
        return result


class RecordingExecutor:
    """A wrapper of a loaded executor that keeps the steps that pass, from the first one on: their
    entries of text, and the seconds of these."""

    def __init__(self, inner: Executor, *, most_entries: int | None = None) -> None:
        """`most_entries`: a step has one per row and `STEP_ENTRIES` more. Steps after the one that
        fills the recording only pass, and are counted in `left_out`."""
        self._inner = inner
        self._most_entries = most_entries
        self._entries = 0
        self._rows: dict[int, int] = {}
        self.steps: list[RecordedStep] = []
        self.left_out = 0

    def submit(self, plan: StepPlan) -> StepFuture:
        if self._most_entries is not None and self._entries >= self._most_entries:
            self.left_out += 1
            return self._inner.submit(plan)
        if plan.parts and not plan.texts:
            return self._inner.submit(plan)
        whole, plan = plan, plan.first_part() if plan.parts else plan
        self._entries += len(plan.rows) + STEP_ENTRIES
        self._rows.update({one.row: one.sequence_id for one in plan.admitted})
        step = RecordedStep(
            plan, time.perf_counter(), sequences={row: self._rows.get(row, -1) for row in plan.rows}
        )
        self.steps.append(step)
        return _Watched(self._inner.submit(whole), step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def step_lines(steps: Sequence[RecordedStep]) -> list[dict[str, Any]]:
    """Return step records as `roofline.fit.read_records` reads them, one JSON object per step."""
    return [
        {
            "starts": step.plan.starts,
            "counts": step.plan.counts,
            "samples": sum(step.plan.samples) + step.plan.drafts,
            "seconds": step.device_seconds,
        }
        for step in steps
        if step.device_seconds > 0
    ]

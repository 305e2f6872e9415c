"""Recorded steps as the timeline that ui.perfetto.dev and chrome://tracing draw.

The Trace Event Format's complete events ("X": begin and duration in microseconds). Slices of one
track must be disjoint or nested, which is ensured here. Two steps in flight have tracks of their
own, and a prediction that is longer than the room until the next step is drawn shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ...roofline.composition import compose_plan
from ...roofline.step import StepModel
from .recording import RecordedStep

ENGINE, SEQUENCES = 1, 2
LOOP, SECOND, DEVICE, PREDICTED = 1, 2, 3, 4
"""Tracks of the engine."""
TRACKS = {
    LOOP: "engine loop",
    SECOND: "engine loop, second step in flight",
    DEVICE: "device, measured",
    PREDICTED: "roofline, predicted",
}


class _Events:
    """Trace events with times from an origin on."""

    def __init__(self, origin: float) -> None:
        self._origin = origin
        self.found: list[dict[str, Any]] = []

    def name(self, process: int, name: str, track: int | None = None) -> None:
        event: dict[str, Any] = {"ph": "M", "pid": process, "args": {"name": name}}
        if track is None:
            self.found.append({**event, "tid": 0, "name": "process_name"})
        else:
            self.found.append({**event, "tid": track, "name": "thread_name"})

    def add(
        self, process: int, track: int, name: str, begin: float, seconds: float, **arguments: Any
    ) -> None:
        self.found.append(
            {
                "ph": "X",
                "cat": "step",
                "pid": process,
                "tid": track,
                "name": name,
                "ts": round((begin - self._origin) * 1e6, 3),
                "dur": round(seconds * 1e6, 3),
                "args": arguments,
            }
        )


def timeline(
    steps: Sequence[RecordedStep], model: StepModel, *, left_out: int = 0
) -> dict[str, Any]:
    """Draw the loop, the device as measured, the roofline's operators, and a track per sequence.

    The operators are where the roofline expects them, from the start of their step; it cannot
    explain the gap after them. If it expects more time than there is until the next step they are
    shortened alike, and `predicted_us` gives each one's full prediction.

    `left_out`: later steps that are not among `steps`; the engine's name says so.
    """
    spans = device_spans(steps)
    origin = min((min(s.submitted, b) for s, (b, _) in zip(steps, spans, strict=True)), default=0.0)
    events = _Events(origin)
    events.name(ENGINE, f"engine ({left_out} later steps left out)" if left_out else "engine")
    events.name(SEQUENCES, "sequences")
    for track, name in TRACKS.items():
        events.name(ENGINE, name, track)
    named: set[int] = set()
    nexts = [begin for begin, _ in spans[1:]] + [float("inf") for _ in spans[:1]]
    loop_free = {LOOP: 0.0, SECOND: 0.0}
    for step, (begin, seconds), following in zip(steps, spans, nexts, strict=True):
        composition = compose_plan(model.case.arch, step.plan)
        predicted = model.time(composition)
        about = {
            "entries": len(step.plan.rows),
            "tokens": step.plan.tokens,
            "predicted_ms": predicted.seconds * 1e3,
            "limit_ms": predicted.limit_seconds * 1e3,
            "ratio": predicted.seconds / seconds if seconds else None,
            "bound": predicted.bound,
        }
        track = LOOP if loop_free[LOOP] <= step.submitted else SECOND
        from_ = max(step.submitted, loop_free[track])
        loop_free[track] = max(from_, step.ended)
        name = f"step {step.plan.number}"
        events.add(ENGINE, track, name, from_, loop_free[track] - from_, **about)
        events.add(ENGINE, DEVICE, composition.kind, begin, seconds, **about)
        scale = min(1.0, (following - begin) / predicted.seconds)
        at = begin
        for operator in predicted.operators:
            count = operator.count
            events.add(
                ENGINE,
                PREDICTED,
                f"{count.operator} {count.label}",
                at,
                operator.seconds * scale,
                bound=operator.bound,
                calls=count.calls,
                gflop=count.flops * count.calls / 1e9,
                mbytes=count.bytes * count.calls / 1e6,
                limit_us=operator.limit_seconds * 1e6,
                predicted_us=operator.seconds * 1e6,
            )
            at += operator.seconds * scale
        columns = zip(step.plan.rows, step.plan.starts, step.plan.counts, strict=True)
        for row, start, tokens in columns:
            sequence = step.sequences.get(row, -1)
            if sequence not in named:
                named.add(sequence)
                events.name(SEQUENCES, f"sequence {sequence}", sequence)
            decodes = tokens == 1 and start
            label = f"decode at {start}" if decodes else f"{tokens} tokens from {start}"
            events.add(SEQUENCES, sequence, label, begin, seconds, row=row)
    return {"traceEvents": events.found, "displayTimeUnit": "ms"}


def device_spans(steps: Sequence[RecordedStep]) -> list[tuple[float, float]]:
    """Return (begin, seconds) of each step on the device, one after the other.

    A step's end is known when its result is taken, which at depth 2 may be later than it was. If it
    would reach into the next one it is moved forward.
    """
    spans = [(step.ended - step.device_seconds, step.device_seconds) for step in steps]
    for index in range(len(spans) - 2, -1, -1):
        begin, seconds = spans[index]
        spans[index] = min(begin, spans[index + 1][0] - seconds), seconds
    assert all(a[0] + a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(spans))
    return spans

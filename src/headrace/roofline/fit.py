"""Efficiencies fitted from recorded steps, with the error of the fit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..base.errors import InvalidRequest
from .composition import compose
from .counts import Case
from .efficiency import Efficiency
from .hardware import Hardware
from .operators import count_step
from .step import compute_seconds, memory_seconds

FITTED = (
    "product_compute", "product_memory", "attention_compute", "attention_memory",
    "vector_memory", "overlap", "launch_seconds", "step_seconds",
)  # fmt: skip
PULL = 1e-3
"""Weight of a parameter's distance from its default: decides what the steps do not tell."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as it ran: its columns and its time on the device in seconds."""

    starts: list[int]
    counts: list[int]
    samples: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted efficiencies and their relative errors |predicted / measured - 1|."""

    efficiency: Efficiency
    steps: int
    median_error: float
    worst_error: float


def read_records(path: Path) -> list[StepRecord]:
    """One JSON object a line: starts, counts, samples, seconds."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            data = json.loads(line)
            samples, seconds = int(data["samples"]), float(data["seconds"])
            records.append(StepRecord(list(data["starts"]), list(data["counts"]), samples, seconds))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path}, line {number}: not a step record ({error})") from None
    return records


def fit_efficiency(case: Case, hardware: Hardware, records: Sequence[StepRecord]) -> Fit:
    """The efficiencies that make predicted steps most like the recorded ones.

    Least squares of log(predicted / measured), by multiplicative coordinate search from the
    hardware's own values; slight ridge towards those, so that what no step shows stays as it was.
    Efficiencies stay within 0.01 … 1.5 (a cache can beat the memory's bandwidth).
    """
    if len(records) < 3:
        raise InvalidRequest(f"a fit needs at least 3 recorded steps, not {len(records)}")
    table = _Table(case, hardware, records)
    start = np.array([getattr(hardware.efficiency, name) for name in FITTED])
    start[-2:] = np.maximum(start[-2:], 1e-7)
    start[-3] = min(max(start[-3], 0.05), 0.95)
    low, high = np.full(len(FITTED), 1e-2), np.full(len(FITTED), 1.5)
    low[-2:], high[-2:] = 1e-8, 1.0
    high[-3] = 1.0

    def cost(values: Array) -> float:
        error = np.log(table.predict(values) / table.measured)
        return float(np.mean(error**2) + PULL * np.mean(np.log(values / start) ** 2))

    values, best, stride = start.copy(), cost(start), 2.0
    while stride > 1.002:
        improved = False
        for index in range(len(values)):
            for factor in (stride, 1 / stride):
                trial = values.copy()
                trial[index] = min(max(trial[index] * factor, low[index]), high[index])
                found = cost(trial)
                if found < best * (1 - 1e-9):
                    values, best, improved = trial, found, True
        if not improved:
            stride = stride**0.5
    errors = np.abs(table.predict(values) / table.measured - 1)
    fitted = replace(
        hardware.efficiency,
        **dict(zip(FITTED, map(float, values), strict=True)),
        curves={},
        source=f"fitted on {len(records)} steps, median error {np.median(errors):.1%}",
    )
    return Fit(fitted, len(records), float(np.median(errors)), float(errors.max()))


def prediction_errors(
    case: Case, hardware: Hardware, records: Sequence[StepRecord]
) -> tuple[float, float]:
    """(median, worst) relative error of the hardware's own efficiencies on recorded steps."""
    table = _Table(case, hardware, records)
    values = np.array([getattr(hardware.efficiency, name) for name in FITTED])
    errors = [float(error) for error in np.abs(table.predict(values) / table.measured - 1)]
    return median(errors), max(errors)


class _Table:
    """Times at the ceilings, one row per (step, operator), for fast trials of efficiencies."""

    def __init__(self, case: Case, hardware: Hardware, records: Sequence[StepRecord]) -> None:
        rows: list[tuple[int, int, float, float, int]] = []
        kinds = {"product": 0, "experts": 0, "attention": 1, "vector": 2}
        for number, record in enumerate(records):
            step = compose(case.arch, record.starts, record.counts, record.samples)
            counts = count_step(case, step)
            for count in itertools.chain.from_iterable(c.parts or (c,) for c in counts):
                if count.kind in kinds:
                    compute = compute_seconds(case, hardware, count, padded=True)
                    memory = memory_seconds(hardware, count)
                    rows.append((number, kinds[count.kind], compute, memory, count.calls))
        self.step = np.array([row[0] for row in rows])
        self.kind = np.array([row[1] for row in rows])
        self.compute = np.array([row[2] for row in rows])
        self.memory = np.array([row[3] for row in rows])
        self.calls = np.array([row[4] for row in rows], dtype=np.float64)
        self.measured = np.array([record.seconds for record in records])

    def predict(self, values: Array) -> Array:
        compute = np.array([values[0], values[2], 1.0])[self.kind]
        memory = np.array([values[1], values[3], values[4]])[self.kind]
        work, wait = self.compute / compute, self.memory / memory
        each = np.maximum(work, wait) + (1 - values[5]) * np.minimum(work, wait) + values[6]
        total = np.bincount(self.step, each * self.calls, minlength=len(self.measured))
        return np.asarray(total + values[7])

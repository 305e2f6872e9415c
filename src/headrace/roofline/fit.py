"""Efficiencies fitted from recorded steps, with the error of the fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..base.errors import InvalidRequest
from ..base.foreign import any_json
from .composition import compose
from .counts import Case
from .efficiency import Curve, Efficiency
from .hardware import Hardware
from .operators import count_step
from .step import compute_seconds, curve_names, memory_seconds, step_time

CLASSES = ("product/few", "product/many", "attention/decode", "attention/prefill")
"""Classes that each have their own shares of compute and memory (`step.curve_names`)."""
SHARES = (
    "product_compute",
    "product_memory",
    "attention_compute",
    "attention_memory",
    "vector_memory",
)
"""Fields of `Efficiency` that are shares of a rate or a bandwidth."""
USUAL_ERROR = 0.1
"""Error up to which the model is the likely cause; above it, mostly a neighbour on the machine."""
PULL = 1e-3
"""Weight of a parameter's distance from its default: decides parameters that no step shows."""

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
    """Read one JSON object a line: starts, counts, samples, seconds."""
    records = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            data = any_json(line)
            samples, seconds = int(data["samples"]), float(data["seconds"])
            records.append(StepRecord(list(data["starts"]), list(data["counts"]), samples, seconds))
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"{path}, line {number}: not a step record ({error})") from None
    return records


def fit_efficiency(case: Case, hardware: Hardware, records: Sequence[StepRecord]) -> Fit:
    """Fit the efficiencies that make predicted steps most like the recorded ones.

    Least squares of log(predicted / measured), beyond `USUAL_ERROR` the plain sizes (P. Charbonnier
    et al., 1997): a step during which the machine stood still must not bend the others. The method
    is multiplicative coordinate search from the hardware's own values, with a slight ridge towards
    them, so that a value that no step shows stays. Efficiencies stay within 0.01 … 1.5 (a cache can
    beat the memory's bandwidth).
    """
    if len(records) < 3:
        raise InvalidRequest(f"a fit needs at least 3 recorded steps, not {len(records)}")
    table = _Table(case, hardware, records)
    start = _values(hardware.efficiency)
    start[-2:] = np.maximum(start[-2:], 1e-7)
    start[-3] = min(max(start[-3], 0.05), 0.95)
    low, high = np.full(len(start), 1e-2), np.full(len(start), 1.5)
    low[-2:], high[-2:] = 1e-8, 1.0
    high[-3] = 1.0

    def cost(values: Array) -> float:
        error = np.log(table.predict(values) / table.measured) / USUAL_ERROR
        loss = 2 * USUAL_ERROR**2 * (np.sqrt(1 + error**2) - 1)
        return float(np.mean(loss) + PULL * np.mean(np.log(values / start) ** 2))

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
    fitted = _efficiency(
        hardware.efficiency,
        values,
        f"fitted on {len(records)} steps, median error {np.median(errors):.1%}",
    )
    return Fit(fitted, len(records), float(np.median(errors)), float(errors.max()))


def honest(case: Case, hardware: Hardware, records: Sequence[StepRecord]) -> Hardware:
    """Return the hardware with ceilings that no recorded step exceeded.

    A step quicker than all its FLOPs at the full rate shows that rates were measured too low (on a
    busy machine). A step quicker than all its bytes shows the same of bandwidths. Those are raised
    by as much, and their shares lowered, so that predictions stay.
    """
    compute = memory = 1.0
    for record in records:
        step = compose(case.arch, record.starts, record.counts, record.samples)
        floor = step_time(case, hardware, step).floor
        compute = max(compute, floor.compute / record.seconds)
        memory = max(memory, floor.memory / record.seconds)
    if compute == memory == 1.0:
        return hardware
    old = hardware.efficiency
    by = {name: compute if name.endswith("compute") else memory for name in SHARES}
    efficiency = replace(
        old,
        **{name: getattr(old, name) / factor for name, factor in by.items()},
        curves={
            name: replace(curve, compute=curve.compute / compute, memory=curve.memory / memory)
            for name, curve in old.curves.items()
        },
        source=f"{old.source}; ceilings raised, which steps were above: rates by "
        f"{compute - 1:.0%}, bandwidths by {memory - 1:.0%}",
    )
    return replace(
        hardware,
        efficiency=efficiency,
        bandwidth=hardware.bandwidth * memory,
        cache_bandwidth=hardware.cache_bandwidth * memory,
        rates={name: rate * compute for name, rate in hardware.rates.items()},
    )


def prediction_errors(
    case: Case, hardware: Hardware, records: Sequence[StepRecord]
) -> tuple[float, float]:
    """Return (median, worst) relative error of the hardware's efficiencies on recorded steps."""
    table = _Table(case, hardware, records)
    values = _values(hardware.efficiency)
    errors = [float(error) for error in np.abs(table.predict(values) / table.measured - 1)]
    return median(errors), max(errors)


def _values(efficiency: Efficiency) -> Array:
    """Return the parameters of a fit: shares by class, then vector memory, overlap, launch,
    step."""
    shares = []
    for name in CLASSES:
        curve = efficiency.curve(name.partition("/")[0], (name,))
        shares += [curve.compute, curve.memory]
    rest = [efficiency.vector_memory, efficiency.overlap, efficiency.launch_seconds]
    return np.array([*shares, *rest, efficiency.step_seconds])


def _efficiency(before: Efficiency, values: Array, source: str) -> Efficiency:
    """Turn parameters into an `Efficiency`; the plain shares are those of large products and of
    prefill."""
    *shares, vector, overlap, launch, step = map(float, values)
    curves = {
        name: Curve(compute, memory, overlap, launch)
        for name, compute, memory in zip(CLASSES, shares[::2], shares[1::2], strict=True)
    }
    product, attention = curves["product/many"], curves["attention/prefill"]
    return replace(
        before,
        product_compute=product.compute,
        product_memory=product.memory,
        attention_compute=attention.compute,
        attention_memory=attention.memory,
        vector_memory=vector,
        overlap=overlap,
        launch_seconds=launch,
        step_seconds=step,
        curves=curves,
        source=source,
    )


class _Table:
    """Times at the ceilings, one row per (step, operator), for fast trials of efficiencies."""

    def __init__(self, case: Case, hardware: Hardware, records: Sequence[StepRecord]) -> None:
        rows: list[tuple[int, int, float, float, int]] = []
        fixed = hardware.efficiency
        admits: list[float] = []
        """Seconds of each step that are not fitted."""
        for number, record in enumerate(records):
            step = compose(case.arch, record.starts, record.counts, record.samples)
            counts = count_step(case, step)
            admits.append(fixed.around(step.tokens, step.samples) - fixed.step_seconds)
            for count in itertools.chain.from_iterable(c.parts or (c,) for c in counts):
                if count.kind != "network":
                    names = curve_names(case, hardware, count)
                    known = [CLASSES.index(name) for name in names if name in CLASSES]
                    compute = compute_seconds(case, hardware, count, padded=True)
                    memory = memory_seconds(hardware, count)
                    class_ = known[0] if known else len(CLASSES)
                    rows.append((number, class_, compute, memory, count.calls))
        self.step = np.array([row[0] for row in rows])
        self.class_ = np.array([row[1] for row in rows])
        self.compute = np.array([row[2] for row in rows])
        self.memory = np.array([row[3] for row in rows])
        self.calls = np.array([row[4] for row in rows], dtype=np.float64)
        self.admits = np.array(admits)
        self.measured = np.array([record.seconds for record in records])

    def predict(self, values: Array) -> Array:
        *shares, vector, overlap, launch, step = values
        compute = np.array([*shares[::2], 1.0])[self.class_]
        memory = np.array([*shares[1::2], vector])[self.class_]
        work, wait = self.compute / compute, self.memory / memory
        each = np.maximum(work, wait) + (1 - overlap) * np.minimum(work, wait) + launch
        total = np.bincount(self.step, each * self.calls, minlength=len(self.measured))
        return np.asarray(total + self.admits + step)

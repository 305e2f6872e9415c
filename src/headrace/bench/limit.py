"""Share of the roofline: the least time of the hardware for a run, over the run's duration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..roofline.composition import decode_step, prefill_step
from ..roofline.counts import Case
from ..roofline.hardware import Hardware
from ..roofline.plot import Chart, Series
from ..roofline.report import roofline_chart
from ..roofline.step import StepTime, step_time
from .audit import Finding
from .metrics import Run
from .record import RequestRecord

NOISE = 0.05
"""Relative difference between repeated probes of a machine's ceilings."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time for a run's work on given hardware, and the predicted time."""

    share: float
    """Least seconds for all its prefills and decode steps / seconds of the run."""
    predicted_share: float
    """Predicted seconds / seconds of the run: near 1 if the prediction is right and the server was
    always busy."""
    flops: float
    bytes: float
    """Bytes read by all prefills and decode steps."""
    seconds: float
    """Duration of the run."""
    decode: StepTime
    decode_seconds: float
    """The measured median TPOT."""
    batch: int


def limit_of(run: Run, case: Case, hardware: Hardware) -> Limit | None:
    """Compute the limit at the run's own concurrency and mean lengths; None without good requests.

    No batching beats this limit, the larger of two times: all products and attention at the full
    rate; or reading the weights once per step and each sequence's KV once per piece. There are at
    least Σ 1 / b steps over the pieces that came while b requests were in the server. The predicted
    time is Σ prefill(prompt - cached) + (tokens - 1) · decode(batch) / batch.
    """
    good = [record for record in run.good if record.tokens and record.chunk_ns]
    if not good:
        return None
    steps = _least_steps(run, good)
    pieces = sum(len(record.chunk_ns) - 1 for record in good)
    batch = max(1, round(pieces / steps)) if steps else 1
    prompts = [record.prompt_tokens or record.known_prompt_tokens or 1 for record in good]
    tokens = [record.tokens for record in good]
    mean = round(sum(prompts) / len(prompts) + sum(tokens) / len(tokens) / 2)
    decode = step_time(case, hardware, decode_step(case.arch, batch, mean))
    predicted = flops = moved = compute = network = 0.0
    seen: dict[tuple[int, int], StepTime] = {}
    for record, prompt in zip(good, prompts, strict=True):
        cached = min(record.cached_tokens or 0, prompt - 1)
        # Rounded so that similar prompts share one computation; down because it is a limit.
        key = max(1, (prompt - cached) // 8 * 8), cached // 8 * 8
        first = seen.get(key)
        if first is None:
            first = seen[key] = step_time(case, hardware, prefill_step(case.arch, [key[0]], key[1]))
        share = (record.tokens - 1) / batch
        predicted += first.seconds + share * decode.seconds
        flops += first.flops + share * decode.flops
        moved += first.bytes + share * decode.bytes
        compute += first.floor.compute + share * decode.floor.compute
        network += first.floor.network + share * decode.floor.network
    least = max(compute, steps * decode.floor.memory, network)
    pauses = sorted(
        (record.chunk_ns[-1] - record.chunk_ns[0]) / 1e9 / (record.tokens - 1)
        for record in good
        if record.tokens > 1
    )
    measured = pauses[len(pauses) // 2] if pauses else 0.0
    return Limit(
        least / run.seconds,
        predicted / run.seconds,
        flops,
        moved,
        run.seconds,
        decode,
        measured,
        batch,
    )


def _least_steps(run: Run, good: Sequence[RequestRecord]) -> float:
    """Return Σ 1 / (requests in the server) over all pieces except each answer's first."""
    sent = np.sort([record.sent_ns for record in run.records])
    ended = np.sort([record.end_ns for record in run.records])
    times = np.array([time for record in good for time in record.chunk_ns[1:]])
    flying = np.searchsorted(sent, times, "right") - np.searchsorted(ended, times, "left")
    return float(np.sum(1 / np.maximum(1, flying)))


def add_limit(result: dict[str, Any], found: Limit, case: Case, hardware: Hardware) -> None:
    """Add the figures, their reference values and the chart to the result document.

    A share above one makes the run invalid: it was not this model on this hardware.
    """
    if found.share > 1 + NOISE:
        result["valid"] = False
        result["findings"].insert(
            0,
            Finding(
                "invalid",
                "above_roofline",
                f"{found.share:.0%} of what {hardware.name} allows for this model: the server runs "
                "another model, format or hardware than was said, or the calibration is wrong "
                "(headrace roofline --calibrate)",
            )._asdict(),
        )
    result["figures"]["roofline_share"] = {"value": found.share, "unit": "share"}
    result["figures"]["predicted_share"] = {"value": found.predicted_share, "unit": "share"}
    result["roofline"] = {
        "hardware": hardware.name,
        "efficiency": hardware.efficiency.source,
        "batch": found.batch,
        "decode_limit_seconds": found.decode.limit_seconds,
        "decode_predicted_seconds": found.decode.seconds,
        "decode_measured_seconds": found.decode_seconds,
        "bound": found.decode.bound,
        "chart": asdict(limit_chart(case, hardware, found)),
    }


def limit_chart(case: Case, hardware: Hardware, found: Limit) -> Chart:
    """Draw the roofline with the decode step's operators, and the step and whole run as
    measured."""
    step = found.decode
    at, whole = step.flops / step.bytes, found.flops / found.bytes
    points = [("decode step, predicted", at, step.flops / step.seconds, "points")]
    if found.decode_seconds:
        points.append(("decode step, measured", at, step.flops / found.decode_seconds, "marked"))
    points.append(("whole run, measured", whole, found.flops / found.seconds, "marked"))
    return roofline_chart(
        case, hardware, step, [Series(name, [x], [y], mark) for name, x, y, mark in points]
    )

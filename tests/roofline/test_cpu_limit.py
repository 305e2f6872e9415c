"""Recorded steps of the default model on this project's CPU are below the limit.

`benchmarks/results/cpu_limit.json` has 60 steps (best of seven rounds), the bytes of the model's
file, and the ceilings that the probes found some minutes before, on a machine whose memory is
shared with other machines.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.roofline.composition import compose, decode_step
from headrace.roofline.counts import Case
from headrace.roofline.fit import StepRecord, fit_efficiency, honest
from headrace.roofline.hardware import Hardware
from headrace.roofline.step import step_time
from headrace.roofline.weights import WeightBytes

from .archs import QWEN_05B

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KEPT: dict[str, Any] = json.loads((RESULTS / "cpu_limit.json").read_text())
CASE = Case(QWEN_05B, WeightBytes(**KEPT["weights"]), *KEPT["dtypes"])
RECORDS = [StepRecord(**step) for step in KEPT["steps"]]
PREFILL = [max(record.counts) > 1 for record in RECORDS]
NOISE = 0.48
"""Factor by which the memory was quicker for the quickest decode than for the probe."""


def shares(hardware: Hardware) -> tuple[float, float]:
    """(largest share of the limit in decoding steps, in steps with prompts)."""
    found = [
        step_time(
            CASE, hardware, compose(QWEN_05B, one.starts, one.counts, one.samples)
        ).limit_seconds
        / one.seconds
        for one in RECORDS
    ]
    pairs = list(zip(found, PREFILL, strict=True))
    return max(x for x, prompt in pairs if not prompt), max(x for x, prompt in pairs if prompt)


def test_measured_is_at_most_the_limit() -> None:
    probed = Hardware(**KEPT["probed"])
    decode, prefill = shares(probed)
    assert prefill <= 1, "rates were probed well: no tolerance"
    assert 1 < decode <= 1 + NOISE
    fitted = probed.fitted(fit_efficiency(CASE, probed, RECORDS).efficiency)
    raised = honest(CASE, fitted, RECORDS)
    assert shares(raised) == pytest.approx((1.0, prefill), rel=1e-6)
    assert raised.rates == probed.rates, "what no step was above stays"
    assert replace(raised, efficiency=fitted.efficiency) != fitted


def test_a_greedy_head_is_above_its_limit() -> None:
    """The head of `profile_default.json` was quicker than all its bytes: it reads the plane of the
    high bits, and of the other that of candidates alone. The limit counts the former."""
    kept = json.loads((RESULTS / "profile_default.json").read_text())["operators"]
    (head,) = (one for one in kept if (one["steps"], one["operator"]) == ("decode", "head"))
    assert head["seconds"] < head["limit_seconds"], "as it was counted then"
    times = step_time(CASE, Hardware(**KEPT["probed"]), decode_step(QWEN_05B, 1, 200)).operators
    (limit,) = (one for one in times if one.count.label == "head")
    whole = limit.count.weight_bytes / KEPT["probed"]["bandwidth"]
    assert head["seconds"] >= head["limit_seconds"] * limit.limit_seconds / whole
    assert limit.limit_seconds / whole == pytest.approx(352 / (352 + 192), rel=1e-9), "layout.h"

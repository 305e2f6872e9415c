"""A server's overhead around its steps: the time of a run minus that of its steps alone.

Three short closed loops run against a server of this machine. With one user, the pause between two
tokens is a step and the work around it. Each further user adds the cost of a row to the pause. A
short prompt's step is hardly longer than a decode, so its time to the first token shows the costs
of gateway and answer. With a long prompt, an error of a tenth in its predicted step would be
mistaken for them.

Every figure is a quantile or a trimmed mean, so one stall of the machine does not change it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import HeadraceError
from ..engine.simulator.sim import Cluster
from ..engine.simulator.sim_replica import ReplicaSpec
from ..roofline.hardware import Loop
from .metrics import Run, itl, sample, ttft
from .options import RunOptions
from .run import run_bench
from .virtual import Simulation

MANY, ONE, SHORT = "many", "one", "short"
USERS = 8
USUAL = {"input": "uniform:64:192", "output": "uniform:24:48"}
LOADS: dict[str, dict[str, Any]] = {
    MANY: {"concurrency": USERS, "requests": 24, **USUAL},
    ONE: {"concurrency": 1, "requests": 12, **USUAL},
    SHORT: {"concurrency": 1, "requests": 12, "input": "8", "output": "2"},
}
"""Loads in order: several users first, to warm up before a single user is timed."""
NONE = Loop(0.0)
LEAST_HITCH = 1e-3
"""Shortest interruption in seconds; shorter ones count as normal variation of a step."""


def measure_loop(url: str, spec: ReplicaSpec, model: str | None, seed: int) -> Loop:
    """Measure the server at `url`, configured as `spec`, for half a minute.

    The tokenizer of `model` makes the prompts. Raises `HeadraceError` for a run that is not valid.
    """
    real: dict[str, Seen] = {}
    bare: dict[str, Seen] = {}
    for number, (name, load) in enumerate(LOADS.items()):
        options = RunOptions(url=url, tokenizer=model, seed=seed + number, **load)
        outcome = run_bench(options)
        if (failed := load["requests"] - outcome.result["succeeded"]) > 0:
            raise HeadraceError(f"{failed} requests to {url} failed")
        real[name] = seen(outcome.run)
        bare[name] = seen(simulate(spec, options, NONE)[1])
    return loop_of(real, bare)


def simulate(spec: ReplicaSpec, options: RunOptions, loop: Loop) -> tuple[dict[str, Any], Run]:
    """Return (document, run) of the same load on virtual time with `loop` around the steps."""
    hardware = replace(spec.hardware, loop=loop)
    options = replace(options, url="simulated", tokenizer=None, warmup=0)
    return Simulation(Cluster(replace(spec, hardware=hardware), 1), options).run()


class Seen(NamedTuple):
    """Figures of a run, in seconds."""

    ttft: float
    """Median time to the first token."""
    pause: float
    """Median between two tokens."""
    lost: float
    """Excess of the mean pause over the median, each pause capped at the 99th percentile."""
    length: float
    """Mean of the exponential tail with the pauses' 90th and 99th percentiles."""


def seen(run: Run) -> Seen:
    """Compute figures of a run that a stall of the machine hardly affects."""
    pauses = np.array(sample(itl, run.records))
    median, slow, tail = np.percentile(pauses, (50, 90, 99))
    lost = np.minimum(pauses, tail).mean() - median
    first = np.median(sample(ttft, run.records))
    return Seen(float(first), float(median), float(lost), float(tail - slow) / math.log(10))


def loop_of(real: dict[str, Seen], bare: dict[str, Seen]) -> Loop:
    """Derive the overhead from the three measured runs and the same runs with steps alone.

    With one user every pause is one step. The mean time lost to interruptions, divided by their
    mean length, is their number.
    """
    one, many = (real[name].pause - bare[name].pause for name in (ONE, MANY))
    row = max(0.0, (many - one) / (USERS - 1))
    step = max(0.0, one - row)
    rest = max(0.0, real[SHORT].ttft - bare[SHORT].ttft - step - row)
    length = real[ONE].length - bare[ONE].length
    lost = max(0.0, real[ONE].lost - bare[ONE].lost)
    if length < LEAST_HITCH or not lost:
        return Loop(rest / 2, step, row, rest / 2)
    return Loop(rest / 2, step, row, rest / 2, lost / (length * real[ONE].pause), length)

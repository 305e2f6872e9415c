"""What a server costs around its steps: what a run takes longer than its steps alone.

Three short closed loops against a server of this machine. With one user at a time the pause between
two tokens is a step and what is done beside it; what each further user adds to the pause is the
cost of a row. The first token of a prompt so short that its step is hardly longer than a decode has
waited for the gateway and the answer as well: of a long one, a tenth by which its step is told
wrong would be taken for them.

Every figure is a quantile, or a mean without the longest: one stall of the machine moves none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..base.errors import HeadraceError
from ..engine.sim import Cluster
from ..engine.sim_replica import ReplicaSpec
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
"""The several first, so that nothing is cold when one user alone is timed."""
NONE = Loop(0.0)
LEAST_HITCH = 1e-3
"""Shorter ones are a step's own spread."""


def measure_loop(url: str, spec: ReplicaSpec, model: str | None, seed: int) -> Loop:
    """Measure the server at `url`, which runs as `spec` says, for half a minute.

    `model`: whose tokenizer makes the prompts. Raises `HeadraceError` for a run that is not valid.
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
    """(document, run) of the same load on virtual time with so much around the steps."""
    hardware = replace(spec.hardware, loop=loop)
    options = replace(options, url="simulated", tokenizer=None, warmup=0)
    return Simulation(Cluster(replace(spec, hardware=hardware), 1), options).run()


class Seen(NamedTuple):
    """What a run is reduced to, in seconds."""

    ttft: float
    """Median time to the first token."""
    pause: float
    """Median between two tokens."""
    lost: float
    """Excess of the mean pause, of which none counts as longer than the 99th percentile."""
    length: float
    """Mean of an exponential tail that has the pauses' 90th and 99th percentiles."""


def seen(run: Run) -> Seen:
    """The figures of a run that a stall of the machine hardly moves."""
    pauses = np.array(sample(itl, run.records))
    median, slow, tail = np.percentile(pauses, (50, 90, 99))
    lost = np.minimum(pauses, tail).mean() - median
    first = np.median(sample(ttft, run.records))
    return Seen(float(first), float(median), float(lost), float(tail - slow) / math.log(10))


def loop_of(real: dict[str, Seen], bare: dict[str, Seen]) -> Loop:
    """From the three runs as they were and as the steps alone would be.

    Of one user every pause is one step: what the mean lost to interruptions, and how long they are
    in the mean, tell how many there were.
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

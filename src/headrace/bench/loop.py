"""What a server costs around its steps: what a run takes longer than its steps alone.

Three short closed loops against a server of this machine. With one user at a time the pause between
two tokens is a step and what is done beside it; what each further user adds to the pause is the
cost of a row. The first token of a prompt so short that its step is hardly longer than a decode has
waited for the gateway and the answer as well: of a long one, a tenth by which its step is told
wrong would be taken for them.

Every figure is a quantile, which one stall of the machine does not move.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from ..base.errors import HeadraceError
from ..engine.sim import Cluster, ReplicaSpec
from ..roofline.hardware import Loop
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
MOST_HITCHES = 0.5
"""Largest share of the steps that has one: the median has none."""


def measure_loop(url: str, spec: ReplicaSpec, model: str | None, seed: int) -> Loop:
    """Measure the server at `url`, which runs as `spec` says, for half a minute.

    `model`: whose tokenizer makes the prompts. Raises `HeadraceError` for a run that is not valid.
    """
    real: dict[str, Seen] = {}
    bare: dict[str, Seen] = {}
    for number, (name, load) in enumerate(LOADS.items()):
        options = RunOptions(url=url, tokenizer=model, seed=seed + number, **load)
        result = run_bench(options).result
        if result["succeeded"] < options.requests:
            failed = options.requests - result["succeeded"]
            raise HeadraceError(f"{failed} requests to {url} failed")
        real[name] = seen(result)
        bare[name] = seen(simulate(spec, options, NONE))
    return loop_of(real, bare)


def simulate(spec: ReplicaSpec, options: RunOptions, loop: Loop) -> dict[str, Any]:
    """The same run on virtual time with so much around the steps."""
    hardware = replace(spec.hardware, loop=loop)
    options = replace(options, url="simulated", tokenizer=None, warmup=0)
    return Simulation(Cluster(replace(spec, hardware=hardware), 1), options).run()[0]


class Seen(NamedTuple):
    """What a run is reduced to, in seconds."""

    ttft: float
    """Median time to the first token."""
    pause: float
    """Median between two tokens."""
    slow: float
    """Excess of the pauses' 90th percentile over their median."""
    tail: float
    """Excess of the 99th."""


def seen(result: dict[str, Any]) -> Seen:
    """The quantiles of a run's document."""
    pauses = result["samples"]["itl"]["percentiles"]
    median = pauses["p50"]
    ttft = result["samples"]["ttft"]["percentiles"]["p50"]
    return Seen(ttft, median, pauses["p90"] - median, pauses["p99"] - median)


def loop_of(real: dict[str, Seen], bare: dict[str, Seen]) -> Loop:
    """From the three runs as they were and as the steps alone would be.

    Interruptions of exponential lengths of mean m in a share s of one user's steps make
    s · exp(-x / m) of the pauses longer by x: the 90th and the 99th percentile tell both.
    """
    one, many = (real[name].pause - bare[name].pause for name in (ONE, MANY))
    row = max(0.0, (many - one) / (USERS - 1))
    step = max(0.0, one - row)
    rest = max(0.0, real[SHORT].ttft - bare[SHORT].ttft - step - row)
    slow, tail = real[ONE].slow - bare[ONE].slow, real[ONE].tail - bare[ONE].tail
    hitch = (tail - slow) / math.log(10)
    if hitch < LEAST_HITCH:
        return Loop(rest / 2, step, row, rest / 2)
    share = min(MOST_HITCHES, 0.1 * math.exp(slow / hitch))
    return Loop(rest / 2, step, row, rest / 2, share / real[ONE].pause, hitch)

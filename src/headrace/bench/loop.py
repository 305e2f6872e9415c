"""What a server costs around its steps: what a run takes longer than its steps alone.

Two short closed loops against a server of this machine. With one user at a time the pause between
two tokens is a step and what is done beside it, and the first token has waited for the gateway and
the answer as well; what each further user adds to the pause is the cost of a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..base.errors import HeadraceError
from ..engine.sim import Cluster, ReplicaSpec
from ..roofline.hardware import Loop
from .options import RunOptions
from .run import run_bench
from .virtual import Simulation

USERS = 8
REQUESTS = {USERS: 24, 1: 12}
"""Requests by users; the several first, so that nothing is cold when one user alone is timed."""
INPUT, OUTPUT = "uniform:64:192", "uniform:24:48"
NONE = Loop(0.0)
LEAST_HITCH = 1e-3
"""Shorter ones are a step's own spread."""


def measure_loop(url: str, spec: ReplicaSpec, model: str | None, seed: int) -> Loop:
    """Measure the server at `url`, which runs as `spec` says, for half a minute.

    `model`: whose tokenizer makes the prompts. Raises `HeadraceError` for a run that is not valid.
    """
    real: dict[int, Seen] = {}
    bare: dict[int, Seen] = {}
    for users, requests in REQUESTS.items():
        options = RunOptions(
            url=url,
            tokenizer=model,
            concurrency=users,
            requests=requests,
            input=INPUT,
            output=OUTPUT,
            seed=seed + users,
        )
        result = run_bench(options).result
        if result["succeeded"] < requests:
            raise HeadraceError(f"{requests - result['succeeded']} requests to {url} failed")
        real[users] = seen(result)
        bare[users] = seen(simulate(spec, options, NONE))
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
    skew: float
    """Excess of the mean pause."""
    tail: float
    """Excess of the 99th percentile."""


def seen(result: dict[str, Any]) -> Seen:
    pauses = result["samples"]["itl"]
    median = pauses["percentiles"]["p50"]
    return Seen(
        result["samples"]["ttft"]["percentiles"]["p50"],
        median,
        pauses["mean"] - median,
        pauses["percentiles"]["p99"] - median,
    )


def loop_of(real: dict[int, Seen], bare: dict[int, Seen]) -> Loop:
    """From runs of one user and of several, as they were and as the steps alone would be.

    Of one user every pause is one step: those far above the median are interruptions, about as
    long as the 99th percentile's and so many that they make up the mean.
    """
    one, many = (real[users].pause - bare[users].pause for users in (1, USERS))
    row = max(0.0, (many - one) / (USERS - 1))
    step = max(0.0, one - row)
    rest = max(0.0, real[1].ttft - bare[1].ttft - step - row)
    hitch = max(0.0, real[1].tail - bare[1].tail)
    lost = max(0.0, real[1].skew - bare[1].skew)
    rate = lost / (hitch * real[1].pause) if hitch > LEAST_HITCH else 0.0
    return Loop(rest / 2, step, row, rest / 2, rate, hitch if rate else 0.0)

"""Autoscaling on the simulator: violated minutes and replica-hours of four rules at a burst.

Run: `python benchmarks/autoscale.py [COLD…]`, seconds until a replica serves (120 15 2); the result
is `results/autoscale.json`, written after each rule. Seventy minutes of Poisson arrivals, five
times as many for a quarter of an hour. No device is involved: step times are the roofline's.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from replicas import (
    Rule,
    Scaler,
    by_demand,
    by_queue,
    by_root,
    carried,
    foreseen,
    scale,
)

from headrace.base.layout import Layout
from headrace.engine.described import make_case
from headrace.engine.sim_replica import ReplicaSpec, SimRequest
from headrace.roofline.hardware import find_hardware

MODEL, HARDWARE, TP = "llama-3.1-70b", "H200", 2
PROMPT, OUTPUT, TTFT = 4096, 16, 2.0
BASE, BURST, MOST, LEAST = 3.0, 5.0, 24, 1
RAMP, FROM, TO, END = 60.0, 1_500.0, 2_400.0, 4_200.0


def requests(
    rate: Callable[[float], float], seconds: float, seed: int
) -> list[tuple[float, SimRequest]]:
    """Poisson arrivals by thinning."""
    draws, prompt, now, made = random.Random(seed), [2] * PROMPT, 0.0, []
    highest = max(rate(float(at)) for at in range(int(seconds) + 1))
    while (now := now + draws.expovariate(highest)) < seconds:
        if draws.random() * highest < rate(now):
            made.append((now, SimRequest(f"r{len(made)}", prompt, OUTPUT, len(made))))
    return made


def main(colds: list[float]) -> None:
    device = find_hardware(HARDWARE, None)
    case = make_case(MODEL, device, layout=Layout(TP))
    spec = ReplicaSpec(
        case, device, rows=64, step_tokens=8192, max_context=8192, depth=2, prefix_cache=False
    )
    capacity = carried(spec, lambda rate: requests(lambda _at: rate, 240.0, 7), TTFT)
    print(f"one replica carries {capacity:.2f} requests a second", flush=True)

    def rate(at: float) -> float:
        if at < FROM or at > TO:
            return BASE
        return BASE * (1 + (BURST - 1) * min(1.0, (at - FROM) / RAMP))

    arrivals = requests(rate, END, 1)
    rules: dict[str, Rule] = {
        "demand": by_demand(capacity),
        "demand, 1.25 headroom": by_demand(capacity, 1.25),
        "demand, 1.5 headroom": by_demand(capacity, 1.5),
        "demand and its root": by_root(capacity),
        "queue wait, 1 s": by_queue(1.0),
        "queue wait, 0.25 s": by_queue(0.25),
    }
    result: dict[str, Any] = {
        "model": MODEL,
        "hardware": f"{TP} x {HARDWARE}, step times of the roofline",
        "prompt_tokens": PROMPT,
        "output_tokens": OUTPUT,
        "slo": f"95 % of first tokens within {TTFT} s, by minute",
        "base_rate": BASE,
        "burst": BURST,
        "capacity": round(capacity, 2),
        "rows": [],
    }
    place = Path(__file__).parent / "results" / "autoscale.json"
    least = int(max(LEAST, -(-BASE // (0.8 * capacity))))
    for cold in colds:
        knowing = {"foreseen": foreseen(rate, 0.8 * capacity, cold)}
        for name, rule in (knowing | rules).items():
            found = scale(spec, Scaler(rule, cold, least, MOST), arrivals, TTFT)
            result["rows"].append({"cold_seconds": cold, "rule": name, **asdict(found)})
            print(result["rows"][-1], flush=True)
            place.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main([float(one) for one in sys.argv[1:]] or [120.0, 15.0, 2.0])

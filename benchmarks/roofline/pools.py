"""A split by the live rule beside as many servers that do both, simulated: tokens a second.

`python benchmarks/roofline/pools.py benchmarks/results/pools.json` runs four workloads on four H200
(Llama 3.1 8B in FP8), 128 users who ask again at once, with none, one and two of the four there to
compute prompts for the others (`--handover pays`). What counts is the middle of each run, from 20
to 55 % of its time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.options import RunOptions
from headrace.bench.virtual import Simulation
from headrace.engine.sim import Cluster
from headrace.engine.sim_replica import ReplicaSpec
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.weights import WIDE_ENDS, WeightBytes

REPLICAS, USERS, ROUNDS = 4, 128, 3
WORKLOADS: dict[str, dict[str, Any]] = {
    "chat": {"input": "lognormal:500:0.8@16-4000", "output": "lognormal:250:0.6@4-1000"},
    "long prompts": {"input": "lognormal:6000:0.4@500-12000", "output": "lognormal:150:0.6@4-600"},
    "long answers": {"input": "lognormal:200:0.6@16-1000", "output": "lognormal:800:0.4@64-2000"},
    "shared prefix": {
        "workload": "shared-prefix",
        "groups": 32,
        "prefix_tokens": 2048,
        "zipf": 0.6,
        "input": "lognormal:400:0.6@16-4000",
        "output": "lognormal:120:0.6@4-1000",
    },
}


def row(name: str, prefill: int) -> dict[str, Any]:
    case = Case(known("llama-3.1-8b")[0], WeightBytes("fp8", formats=WIDE_ENDS), kv_dtype="fp8")
    spec = ReplicaSpec(
        case, DEVICES["H200"], rows=256, max_context=16384, depth=2, kv_tokens=400_000
    )
    wish = WORKLOADS[name]
    options = RunOptions(
        url="simulated", requests=USERS * ROUNDS, concurrency=USERS, seed=1, devices=4, **wish
    )
    cluster = Cluster(
        spec,
        REPLICAS,
        "prefix" if "workload" in wish else "least-loaded",
        prefill=prefill,
        handover="pays",
        told_after=0.1,
    )
    result, run = Simulation(cluster, options).run()
    times = np.concatenate([record.chunk_ns for record in run.records]) / 1e9
    low, high = 0.2 * run.seconds, 0.55 * run.seconds
    tails = {key: value["percentiles"] for key, value in result["samples"].items()}
    return {
        "workload": name,
        "prefill": prefill,
        "replicas": REPLICAS,
        "tokens_per_second": float(((times > low) & (times < high)).sum() / (high - low)),
        "ttft_p50": tails["ttft"]["p50"],
        "ttft_p99": tails["ttft"]["p99"],
        "tpot_p50": tails["tpot"]["p50"],
        "itl_p99": tails["itl"]["p99"],
    }


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name in WORKLOADS:
        for prefill in (0, 1, 2):
            rows.append(row(name, prefill))
            print(rows[-1], flush=True)
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

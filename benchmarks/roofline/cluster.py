"""A simulated study: four routings, 8 to 1,024 H200, shared-prefix requests, 8B and 70B in FP8.

`python benchmarks/roofline/cluster.py OUT.json OUT.png [MODEL…]` prints the table of
docs/cluster-study.md and draws its plots. Rows are kept in OUT.json as they come, and those that
are there are not computed again, so that the study can be done in parts.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from headrace.base.layout import Layout
from headrace.bench.options import RunOptions
from headrace.bench.virtual import Simulation
from headrace.engine.routing import ROUTERS
from headrace.engine.sim import Cluster
from headrace.engine.sim_replica import ReplicaSpec
from headrace.roofline.counts import Case
from headrace.roofline.hardware import DEVICES
from headrace.roofline.known import known
from headrace.roofline.plot import Chart, Series, write_png
from headrace.roofline.weights import WIDE_ENDS, WeightBytes

TOLD, TOLD_SECONDS = "prefix, told", 0.1
"""Prefix affinity that learns in a tenth of a second what each cache gained and lost."""
ROUTINGS = (*ROUTERS, TOLD)
MODELS = {
    "llama-3.1-8b": (1, 20.0, (8, 32, 128)),
    "llama-3.1-70b": (4, 9.0, (32, 128, 512)),
}
"""Model → (devices of a replica, requests a second offered to each replica, cluster sizes)."""
LARGEST = {"llama-3.1-8b": (512, TOLD), "llama-3.1-70b": (2048, TOLD)}
"""One size more with one routing: to see how long the simulator takes."""
PER_REPLICA = 20
KV_TOKENS = 200_000
"""More than 20 requests can fill: the simulator's own memory is what this saves."""
PREFIXES_PER_REPLICA = 4


def study(model: str, devices: int, routing: str) -> dict[str, Any]:
    tp, rate, _ = MODELS[model]
    replicas = devices // tp
    case = Case(
        known(model)[0],
        WeightBytes("fp8", formats=WIDE_ENDS),
        kv_dtype="fp8",
        layout=Layout(tp),
    )
    spec = ReplicaSpec(
        case, DEVICES["H200"], rows=256, max_context=8192, depth=2, kv_tokens=KV_TOKENS
    )
    options = RunOptions(
        url="simulated",
        workload="shared-prefix",
        requests=PER_REPLICA * replicas,
        groups=PREFIXES_PER_REPLICA * replicas,
        prefix_tokens=2048,
        zipf=0.6,
        input="lognormal:400:0.6@16-4000",
        output="lognormal:120:0.6@4-1000",
        arrivals=f"poisson:{rate * replicas:g}",
        slo="ttft:p99<500ms",
        seed=1,
        devices=devices,
    )
    begin = time.perf_counter()
    told_after = TOLD_SECONDS if routing == TOLD else None
    policy = "prefix" if routing == TOLD else routing
    cluster = Cluster(spec, replicas, policy, told_after=told_after)
    result, _ = Simulation(cluster, options).run()
    ttft, itl = result["samples"]["ttft"]["percentiles"], result["samples"]["itl"]["percentiles"]
    row = {
        "model": model,
        "devices": devices,
        "routing": routing,
        "ttft_p50": ttft["p50"],
        "ttft_p99": ttft["p99"],
        "itl_p99": itl["p99"],
        "hits": result["figures"]["prefix_hit_rate"]["value"],
        "possible": result["figures"]["possible_hit_rate"]["value"],
        "goodput_per_device": result["figures"]["goodput"]["value"] / devices,
        "busy_mean": sum(result["simulation"]["busy"]) / replicas,
        "busy_max": max(result["simulation"]["busy"]),
        "steps": result["simulation"]["steps"],
        "virtual_seconds": result["seconds"],
        "seconds": time.perf_counter() - begin,
    }
    print(
        f"| {model} | {devices} | {routing} | {row['ttft_p50'] * 1e3:.0f} | "
        f"{row['ttft_p99'] * 1e3:.0f} | {row['itl_p99'] * 1e3:.0f} | {row['hits']:.0%} of "
        f"{row['possible']:.0%} | {row['goodput_per_device']:.2f} | {row['busy_mean']:.0%} | "
        f"{row['seconds']:.0f} |",
        flush=True,
    )
    return row


def plots(rows: list[dict[str, Any]], path: Path) -> None:
    """Per model: tail and median of TTFT, and how much of the prompts the caches had."""
    charts = []
    for model in MODELS:
        mine = [row for row in rows if row["model"] == model]
        tp = MODELS[model][0]
        for name, title, scale in (
            ("ttft_p50", "TTFT p50, ms", 1e3),
            ("ttft_p99", "TTFT p99, ms", 1e3),
            ("hits", "prompt tokens from caches, %", 100),
        ):
            lines = [
                Series(
                    routing,
                    [row["devices"] for row in mine if row["routing"] == routing],
                    [row[name] * scale for row in mine if row["routing"] == routing],
                )
                for routing in ROUTINGS
            ]
            if name == "hits":
                found = [row for row in mine if row["routing"] == TOLD]
                lines.append(
                    Series(
                        "possible",
                        [row["devices"] for row in found],
                        [row["possible"] * scale for row in found],
                        dashed=True,
                    )
                )
            replicas = "a replica each" if tp == 1 else f"{tp} a replica"
            charts.append(Chart(f"{model}, {replicas}", "H200", title, lines, log_x=True))
    write_png(charts, path, columns=3)


def main() -> None:
    out, picture, names = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] or list(MODELS)
    rows: list[dict[str, Any]] = json.loads(out.read_text()) if out.is_file() else []
    done = {(row["model"], row["devices"], row["routing"]) for row in rows}
    print(
        "| model | devices | routing | TTFT p50 ms | TTFT p99 ms | ITL p99 ms | prefix hits | "
        "good req/s per device | busy | run took s |"
    )
    print("|---|--:|---|--:|--:|--:|--:|--:|--:|--:|")
    gc.disable()  # Millions of small objects without cycles: looking for some takes a third.
    for model in names:
        wanted = list(itertools.product(MODELS[model][2], ROUTINGS))
        if model in LARGEST:
            wanted.append(LARGEST[model])
        for devices, routing in wanted:
            if (model, devices, routing) not in done:
                rows.append(study(model, devices, routing))
                out.write_text(json.dumps(rows, indent=1) + "\n")
    rows.sort(key=lambda row: (list(MODELS).index(row["model"]), row["devices"]))
    out.write_text(json.dumps(rows, indent=1) + "\n")
    plots(rows, picture)


if __name__ == "__main__":
    main()

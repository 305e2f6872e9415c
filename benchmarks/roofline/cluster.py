"""A simulated study: 8 to 2,048 H200, shared-prefix requests, Llama 3.1 8B and 70B in FP8.

`python benchmarks/roofline/cluster.py ROUTINGS.json OUT.png` prints the table of four routings of
docs/cluster-study.md and draws its plots, `… cluster.py GROWTH.json` the table of goodput by size.
Rows are kept as they come, and those that are there are not computed again, so that the study can
be done in parts.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.base.layout import Layout
from headrace.bench.metrics import Run, request_values
from headrace.bench.options import RunOptions
from headrace.bench.record import RequestRecord
from headrace.bench.virtual import Simulation
from headrace.engine.routing import ROUTERS
from headrace.engine.sim import Cluster, Failures
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
WARM, COUNTED, COUNTED_IN_ALL = 40, 20, 4000
"""Requests of a replica before those that count; those that count, of each and at least of all."""
DEATHS = Failures(120.0, 10.0)
GROWTH: list[tuple[str, int, float, int, Failures | None]] = [
    *(("llama-3.1-8b", devices, 20.0, COUNTED_IN_ALL, None) for devices in (8, 128)),
    *(("llama-3.1-70b", devices, 9.0, COUNTED_IN_ALL, None) for devices in (8, 2048)),
    *(("llama-3.1-70b", devices, 20.0, COUNTED_IN_ALL, None) for devices in (8, 128, 512)),
    *(("llama-3.1-70b", 128, 9.0, 6000, failures) for failures in (None, DEATHS)),
]
"""(model, devices, requests a second of a replica, those that count, deaths)."""
SLO = "ttft:p99<500ms,tpot:p99<50ms"
KV_TOKENS = 200_000
"""A smaller pool than memory holds: the simulator's own memory is what this saves."""
PREFIXES_PER_REPLICA = 4
Row = dict[str, Any]


def simulated(
    model: str,
    devices: int,
    routing: str,
    rate: float,
    requests: int,
    failures: Failures | None = None,
) -> tuple[Row, Run]:
    """What all rows have, and the run."""
    replicas = devices // MODELS[model][0]
    case = Case(
        known(model)[0],
        WeightBytes("fp8", formats=WIDE_ENDS),
        kv_dtype="fp8",
        layout=Layout(MODELS[model][0]),
    )
    spec = ReplicaSpec(
        case, DEVICES["H200"], rows=256, max_context=8192, depth=2, kv_tokens=KV_TOKENS
    )
    options = RunOptions(
        url="simulated",
        workload="shared-prefix",
        requests=requests,
        groups=PREFIXES_PER_REPLICA * replicas,
        prefix_tokens=2048,
        zipf=0.6,
        input="lognormal:400:0.6@16-4000",
        output="lognormal:120:0.6@4-1000",
        arrivals=f"poisson:{rate * replicas:g}",
        slo=SLO,
        seed=1,
        devices=devices,
    )
    begin = time.perf_counter()
    told_after = TOLD_SECONDS if routing == TOLD else None
    policy = "prefix" if routing == TOLD else routing
    cluster = Cluster(spec, replicas, policy, told_after=told_after, failures=failures)
    result, run = Simulation(cluster, options).run()
    row = {
        "model": model,
        "devices": devices,
        "routing": routing,
        "hits": result["figures"]["prefix_hit_rate"]["value"],
        "possible": result["figures"]["possible_hit_rate"]["value"],
        "steps": result["simulation"]["steps"],
        "lost": result["simulation"].get("failures"),
        "virtual_seconds": result["seconds"],
        "seconds": time.perf_counter() - begin,
    }
    return row, run


def percentiles(records: Sequence[RequestRecord], *names: str) -> Row:
    """The median, the 99th percentile and the largest of some metrics, in seconds."""
    found: Row = {}
    for name in names:
        values = [value for record in records for value in request_values(name, record)]
        at = np.percentile(values, (50, 99, 100)).tolist()
        found |= dict(zip((f"{name}_p50", f"{name}_p99", f"{name}_max"), at, strict=True))
    return found


def grown(model: str, devices: int, rate: float, at_least: int, failures: Failures | None) -> Row:
    """Goodput of a window: from caches that are warm to the last arrival. Of the requests that
    come within it those count that kept the limits, whenever they ended."""
    replicas = devices // MODELS[model][0]
    counted = max(COUNTED * replicas, at_least)
    row, run = simulated(model, devices, TOLD, rate, WARM * replicas + counted, failures)
    steady = run.records[-counted:]
    window = (steady[-1].planned_ns - steady[0].planned_ns) / 1e9
    assert run.slo is not None
    good = sum(run.slo.met_by(record) for record in steady if record.ok)
    row |= percentiles(steady, "ttft", "itl")
    row |= {"rate": rate, "counted": counted, "good": good / counted}
    row |= {"goodput_per_device": good / window / devices}
    print(
        f"| {model} | {rate:g} | {devices} | {good / window / devices:.2f} | {good / counted:.2%} "
        f"| {row['ttft_p50'] * 1e3:.0f} | {row['ttft_p99'] * 1e3:.0f} | {row['itl_p99'] * 1e3:.0f} "
        f"| {row['itl_max'] * 1e3:.0f} | {row['hits']:.0%} of {row['possible']:.0%} | "
        f"{row['seconds']:.0f} | {row['lost'] or ''}",
        flush=True,
    )
    return row


def study(model: str, devices: int, routing: str) -> Row:
    """One routing, from empty caches on."""
    tp, rate, _ = MODELS[model]
    row, run = simulated(model, devices, routing, rate, PER_REPLICA * devices // tp)
    row |= percentiles(run.records, "ttft", "itl")
    print(
        f"| {model} | {devices} | {routing} | {row['ttft_p50'] * 1e3:.0f} | "
        f"{row['ttft_p99'] * 1e3:.0f} | {row['itl_p99'] * 1e3:.0f} | {row['hits']:.0%} of "
        f"{row['possible']:.0%} | {row['seconds']:.0f} |",
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
    out = Path(sys.argv[1])
    rows: list[Row] = json.loads(out.read_text()) if out.is_file() else []
    gc.disable()  # Millions of small objects without cycles: looking for some takes a third.
    if len(sys.argv) == 2:
        for case in GROWTH[len(rows) :]:
            rows.append(grown(*case))
            out.write_text(json.dumps(rows, indent=1) + "\n")
        return
    done = {(row["model"], row["devices"], row["routing"]) for row in rows}
    for model in MODELS:
        for devices, routing in (*itertools.product(MODELS[model][2], ROUTINGS), LARGEST[model]):
            if (model, devices, routing) not in done:
                rows.append(study(model, devices, routing))
                out.write_text(json.dumps(rows, indent=1) + "\n")
    rows.sort(key=lambda row: (list(MODELS).index(row["model"]), row["devices"]))
    out.write_text(json.dumps(rows, indent=1) + "\n")
    plots(rows, Path(sys.argv[2]))


if __name__ == "__main__":
    main()

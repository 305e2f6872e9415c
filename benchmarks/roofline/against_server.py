"""The simulator next to our own server under the same load, on this machine, at ordinary priority.

`python benchmarks/roofline/against_server.py MODEL OUT.json [--loads …] [--seeds N …]` right after
`headrace roofline MODEL --calibrate --measure`. A fresh server first has the short loops of
`bench.loop`, which tell what is around its steps. Nothing else is fitted: the loads that follow are
predictions. For each seed and load: a run of the bench
against the server, one of the simulator with the same options, and their figures. Each load has
seeds of its own: of one seed, prompts of one length begin those of another, and the server would
know some of them, which the simulator begins without. Rows are added to OUT.json, so that the loads
can be run in several short sittings; `others` is the share of the machine that neither the server
nor this client used meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.loop import measure_loop, simulate
from headrace.bench.options import RunOptions
from headrace.bench.run import run_bench
from headrace.bench.virtual import COURSES, bands
from headrace.engine.loop.start import DEPTH
from headrace.engine.simulator.described import make_case
from headrace.engine.simulator.sim import Cluster
from headrace.engine.simulator.sim_replica import ReplicaSpec
from headrace.roofline.efficiency import CPU_EFFICIENCY
from headrace.roofline.hardware import Loop
from headrace.roofline.machine import this_hardware

CONTEXT, ROWS, STEP_TOKENS = 2048, 32, 512
LOADS: dict[str, dict[str, Any]] = {
    "closed:1": {"concurrency": 1, "input": "200", "output": "40", "requests": 12},
    "closed:2": {"concurrency": 2, "input": "256", "output": "64", "requests": 16},
    "closed:16": {"concurrency": 16, "input": "64", "output": "96", "requests": 32},
    "poisson:1.2": {
        "arrivals": "poisson:1.2",
        "input": "lognormal:100:0.6@16-600",
        "output": "lognormal:32:0.6@4-200",
        "requests": 36,
    },
    "prefix:6": {
        "workload": "shared-prefix",
        "prefix_tokens": 512,
        "groups": 2,
        "concurrency": 6,
        "input": "64",
        "output": "48",
        "requests": 24,
    },
}
"""Workloads of the field's own trial of the simulator (docs/roofline.md)."""
SHOWN = (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p90"), ("itl", "p99"))


def figures(result: dict[str, Any]) -> dict[str, float]:
    found = {
        f"{name} {which}": float(result["samples"][name]["percentiles"][which])
        for name, which in SHOWN
    }
    return found | {"tok/s": float(result["figures"]["output_throughput"]["value"])}


def spans(spec: ReplicaSpec, options: RunOptions, loop: Loop) -> dict[str, tuple[float, float]]:
    """99th percentiles that the simulated run has in one course and another."""
    around = replace(spec, hardware=replace(spec.hardware, loop=loop))
    virtual = replace(options, url="simulated", tokenizer=None, warmup=0)
    return bands(lambda course: Cluster(around, 1, course=course), virtual, COURSES)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def wait_for(server: subprocess.Popen[bytes], url: str) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit("the server did not start")
        try:
            urllib.request.urlopen(f"{url}/v1/health/ready", timeout=2).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the server was not ready within a minute")


def ticks(path: Path) -> int:
    try:
        fields = path.read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for one in found:
        for path in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def used(server: int) -> tuple[float, float]:
    """Seconds of processor time so far: (all of the machine, the server and this client)."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    own = sum(ticks(Path(f"/proc/{pid}/stat")) for pid in {*family(server), *family(os.getpid())})
    spent = os.times()
    tick = os.sysconf("SC_CLK_TCK")
    mine = spent.children_user + spent.children_system
    return (user + nice + system) / tick, own / tick + mine


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the medians over the seeds, by load and figure, and over all of them."""
    errors: dict[str, dict[str, float]] = {}
    for load in dict.fromkeys(row["load"] for row in rows):
        mine = [row for row in rows if row["load"] == load]
        errors[load] = {
            name: median(row["simulated"][name] for row in mine)
            / median(row["server"][name] for row in mine)
            - 1
            for name in mine[0]["server"]
        }
    every = [abs(error) for found in errors.values() for error in found.values()]
    tails = [
        abs(error)
        for load, found in errors.items()
        if not load.startswith("poisson")
        for name, error in found.items()
        if "p99" in name
    ]
    inside = [
        low <= row["server"][name] <= high
        for row in rows
        for name, (low, high) in row.get("bands", {}).items()
    ]
    return {
        "p99 in their bands": [sum(inside), len(inside)],
        "errors": errors,
        "median": median(every),
        "worst": max(every),
        "closed p99 median": median(tails) if tails else None,
        "closed p99 worst": max(tails) if tails else None,
    }


def show(found: dict[str, Any]) -> None:
    total = summary(found["rows"])
    names = list(found["rows"][0]["server"])
    print("| load | " + " | ".join(names) + " |\n|---|" + "--:|" * len(names))
    for load, errors in total["errors"].items():
        cells = []
        for name in names:
            real = median(row["server"][name] for row in found["rows"] if row["load"] == load)
            shown = f"{real:,.0f}" if name == "tok/s" else f"{real * 1e3:,.1f}"
            cells.append(f"{shown}, {errors[name]:+.0%}")
        print(f"| {load} | " + " | ".join(cells) + " |")
    inside, known = total["p99 in their bands"]
    tails = "–" if total["closed p99 worst"] is None else f"{total['closed p99 worst']:.0%}"
    print(
        f"median error {total['median']:.0%}, worst {total['worst']:.0%}; p99 of closed loops at "
        f"most {tails}; {inside} of {known} in the bands of the "
        "simulator's courses"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--loads", nargs="*", choices=[*LOADS], default=[*LOADS])
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--show", action="store_true", help="the table of what OUT has")
    given = parser.parse_args(arguments)
    out: Path = given.out
    found: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"rows": []}
    if given.show:
        show(found)
        return
    hardware = this_hardware("cpu")
    if hardware is None or hardware.efficiency.source == CPU_EFFICIENCY.source:
        raise SystemExit("run `headrace roofline MODEL --calibrate --measure` first")
    case = make_case(given.model, hardware)
    depth = DEPTH["cpu"]
    spec = ReplicaSpec(case, hardware, ROWS, STEP_TOKENS, CONTEXT, depth=depth)
    port = free_port()
    flags = f"--port {port} --max-context {CONTEXT} --max-sequences {ROWS} "
    flags += f"--step-tokens {STEP_TOKENS} --speculate off"
    server = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", given.model, *flags.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(server, url)
        loop = measure_loop(url, spec, given.model, 1000 + len(found["rows"]))
        print(", ".join(f"{name} {value * 1e3:.3f} ms" for name, value in asdict(loop).items()))
        for seed in given.seeds:
            for load in given.loads:
                own = 100 * seed + list(LOADS).index(load)
                options = RunOptions(url=url, tokenizer=given.model, seed=own, **LOADS[load])
                before, begin = used(server.pid), time.monotonic()
                outcome = run_bench(options).result
                after, seconds = used(server.pid), time.monotonic() - begin
                findings = [one["code"] for one in outcome["findings"]]
                if "stale_hits" in findings:
                    raise SystemExit(f"the server knew prompts of {load}: take another seed")
                virtual, _ = simulate(spec, options, loop)
                span = spans(spec, options, loop)
                rest = after[0] - before[0] - (after[1] - before[1])
                row = {
                    "load": load,
                    "seed": seed,
                    "requests": options.requests,
                    "valid": outcome["valid"],
                    "findings": findings,
                    "others": round(max(0.0, rest) / seconds / (os.cpu_count() or 1), 3),
                    "server": figures(outcome),
                    "simulated": figures(virtual),
                    "bands": {f"{name} p99": span[name] for name in ("ttft", "itl")},
                    "loop": asdict(loop),
                }
                found["rows"].append(row)
                found["efficiency"] = replace(hardware, loop=loop).efficiency.source
                found["summary"] = summary(found["rows"])
                out.write_text(json.dumps(found, indent=1) + "\n")
                print(f"{load}, seed {seed}: others {row['others']:.0%}", flush=True)
    finally:
        server.terminate()
        server.wait()
    show(found)


if __name__ == "__main__":
    main()

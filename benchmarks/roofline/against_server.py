"""The simulator next to our own server under the same load, on this machine.

`python benchmarks/roofline/against_server.py MODEL OUT.json [LOAD…]` after
`headrace roofline MODEL --calibrate --measure`. A fresh server first has one user at a time, from
whom the three constants of the simulated loop are read: what a request costs before the engine, a
step beside its time on the device, and an answer after it. Nothing else is fitted: the loads that
follow are predictions. For each: a run of the bench against the server, one of the simulator with
the same options, and p50 and p99 of TTFT and ITL with their ratios. Rows are added to OUT.json, so
that the loads can be run in several short sittings; a load that is run again gets a further row,
which shows the server's own spread. Needs a quiet machine: what the fit does not know of is in the
ratios.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from headrace.base.config import EngineOptions
from headrace.bench.options import RunOptions
from headrace.bench.run import run_bench
from headrace.bench.virtual import Simulation
from headrace.engine.prediction import case_of, serving_types
from headrace.engine.sim import Cluster, ReplicaSpec
from headrace.loader import open_model
from headrace.roofline.machine import this_hardware

PORT = 8197
PROMPT = -10
"""Niceness of the client and of the server's border."""
CONTEXT, ROWS, STEP_TOKENS = 2048, 32, 512
LOADS = ("poisson:0.5", "poisson:1.0", "closed:4", "closed:8")
REQUESTS = {"closed:1": 12, "poisson:0.5": 20, "poisson:1.0": 32}
SHOWN = (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99"))


def options_of(load: str, model: str, seed: int) -> RunOptions:
    kind, _, number = load.partition(":")
    base = RunOptions(
        url=f"http://127.0.0.1:{PORT}",
        requests=REQUESTS.get(load, 48),
        input="uniform:64:256",
        output="uniform:16:48",
        tokenizer=model,
        seed=seed,
        warmup=2,
    )
    if kind == "closed":
        return replace(base, concurrency=int(number))
    return replace(base, arrivals=load)


def percentiles(result: dict[str, Any]) -> dict[str, float]:
    return {
        f"{name} {which}": result["samples"][name]["percentiles"][which] for name, which in SHOWN
    }


def simulated(spec: ReplicaSpec, options: RunOptions) -> dict[str, Any]:
    return Simulation(
        Cluster(spec, 1), replace(options, tokenizer=None, url="simulated", warmup=0)
    ).run()[0]


def with_constants(spec: ReplicaSpec, options: RunOptions, real: dict[str, float]) -> ReplicaSpec:
    """The loop's constants from one user's medians: ITL has the loop, TTFT all three."""
    bare = percentiles(simulated(spec, options))
    loop = max(0.0, real["itl p50"] - bare["itl p50"])
    around = max(0.0, real["ttft p50"] - bare["ttft p50"] - loop)
    return replace(spec, loop_seconds=loop, gateway_seconds=around / 2, answer_seconds=around / 2)


def wait_for(server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise SystemExit("the server did not start")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/health/ready", timeout=2).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the server was not ready within a minute")


def be_prompt() -> None:
    """This client (and, for now, the server that it starts) before what only computes.

    The engine computes on every core: without this the kernel lets its threads finish their slice
    before a client that has just woken up, and the bench's audit finds the client late.
    """
    with contextlib.suppress(PermissionError):  # Then the audit decides whether it went well.
        os.setpriority(os.PRIO_PROCESS, 0, PROMPT)


def let_the_border_first(server: subprocess.Popen[bytes]) -> None:
    """The engine's threads below the server's border and this client.

    With ordinary priorities back to none; under `chrt -f 2` (a machine on which others work) one
    step lower, since among equals a real-time process never gives way.
    """
    fifo = os.sched_getscheduler(0) == os.SCHED_FIFO
    children = Path(f"/proc/{server.pid}/task").glob("*/children")
    for child in {pid for path in children for pid in path.read_text().split()}:
        for thread in Path(f"/proc/{child}/task").iterdir():
            if fifo:
                os.sched_setscheduler(int(thread.name), os.SCHED_FIFO, os.sched_param(1))
            with contextlib.suppress(PermissionError):
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)


def main() -> None:
    model, out, loads = sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or LOADS
    files, hardware = open_model(model), this_hardware("cpu")
    if hardware is None:
        raise SystemExit("run `headrace roofline MODEL --calibrate --measure` first")
    dtype, kv_dtype = serving_types(files)
    spec = ReplicaSpec(
        case_of(files, dtype=dtype, kv_dtype=kv_dtype),
        hardware,
        ROWS,
        STEP_TOKENS,
        CONTEXT,
        depth=EngineOptions().depth,
        gateway_seconds=0.0,
    )
    be_prompt()
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "headrace",
            "serve",
            model,
            "--port",
            str(PORT),
            "--max-context",
            str(CONTEXT),
            "--max-sequences",
            str(ROWS),
            "--step-tokens",
            str(STEP_TOKENS),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    found: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"rows": []}
    try:
        wait_for(server)
        let_the_border_first(server)
        options = options_of("closed:1", model, 99)
        spec = with_constants(spec, options, percentiles(run_bench(options).result))
        constants = {
            name: getattr(spec, name)
            for name in ("gateway_seconds", "loop_seconds", "answer_seconds")
        }
        print(", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in constants.items()))
        for load in loads:
            # Prompts of its own for every row: what another run asked is in the prefix cache.
            options = options_of(load, model, 100 + len(found["rows"]))
            outcome = run_bench(options).result
            if not outcome["valid"]:
                print(f"not valid: {outcome['findings']}")
            real, virtual = percentiles(outcome), percentiles(simulated(spec, options))
            found["rows"].append(
                {
                    "load": load,
                    "requests": options.requests,
                    "valid": outcome["valid"],
                    "server": real,
                    "simulated": virtual,
                    "constants": constants,
                }
            )
            for name, measured in real.items():
                print(
                    f"{load:12} {name}: server {measured * 1e3:8.1f} ms, simulated "
                    f"{virtual[name] * 1e3:8.1f} ms, ratio {virtual[name] / measured:.2f}",
                    flush=True,
                )
            found["efficiency"] = hardware.efficiency.source
            out.write_text(json.dumps(found, indent=1) + "\n")
    finally:
        server.terminate()
        server.wait()
    errors = [
        abs(row["simulated"][name] / row["server"][name] - 1)
        for row in found["rows"]
        for name in row["server"]
    ]
    print(f"median error {median(errors):.0%}, worst {max(errors):.0%}, of {len(errors)} figures")


if __name__ == "__main__":
    main()

"""The simulator next to our own server under the same load, on this machine.

`python benchmarks/roofline/against_server.py MODEL OUT.json` after `headrace roofline MODEL
--calibrate --measure`. For each load: one run of the bench against a fresh server and one of the
simulator with the same options, interleaved; p50 and p99 of TTFT and ITL, and their ratios.
Needs a quiet machine: what the fit does not know of is in the ratios.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from statistics import median

from headrace.bench.options import RunOptions
from headrace.bench.run import run_bench
from headrace.bench.virtual import Simulation
from headrace.engine.prediction import case_of
from headrace.engine.sim import Cluster, ReplicaSpec
from headrace.loader import open_model
from headrace.roofline.machine import this_hardware

PORT = 8197
CONTEXT, ROWS, STEP_TOKENS = 2048, 32, 512
LOADS = ("poisson:0.5", "poisson:1.0", "closed:4", "closed:8")
SHOWN = (("ttft", "p50"), ("ttft", "p99"), ("itl", "p50"), ("itl", "p99"))


def options_of(load: str, model: str, url: str, seed: int) -> RunOptions:
    kind, _, number = load.partition(":")
    base = RunOptions(
        url=url, requests=24, input="uniform:64:256", output="uniform:16:48", tokenizer=model,
        seed=seed, warmup=1,
    )  # fmt: skip
    if kind == "closed":
        return replace(base, concurrency=int(number))
    return replace(base, arrivals=load)


def main() -> None:
    model, out = sys.argv[1], sys.argv[2]
    files, hardware = open_model(model), this_hardware("cpu")
    if hardware is None:
        raise SystemExit("run `headrace roofline MODEL --calibrate --measure` first")
    case = case_of(files, dtype="float32", kv_dtype="float32")
    spec = ReplicaSpec(case, hardware, ROWS, STEP_TOKENS, CONTEXT, gateway_seconds=0.003)
    server = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", model, "--port", str(PORT), "--max-context",
         str(CONTEXT), "--max-sequences", str(ROWS), "--step-tokens", str(STEP_TOKENS)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    rows, errors = [], []
    try:
        subprocess.run(["sleep", "3"], check=True)
        for number, load in enumerate(LOADS):
            options = options_of(load, model, f"http://127.0.0.1:{PORT}", 100 + number)
            real = run_bench(options).result
            simulated, _ = Simulation(
                Cluster(spec, 1), replace(options, tokenizer=None, url="simulated")
            ).run()
            for name, percentile in SHOWN:
                a = real["samples"][name]["percentiles"][percentile]
                b = simulated["samples"][name]["percentiles"][percentile]
                rows.append([load, name, percentile, a, b, real["valid"]])
                errors.append(abs(b / a - 1))
                print(f"{load:12} {name} {percentile}: server {a * 1e3:8.1f} ms, simulated "
                      f"{b * 1e3:8.1f} ms, ratio {b / a:.2f}", flush=True)  # fmt: skip
    finally:
        server.terminate()
        server.wait()
    print(f"median error {median(errors):.0%}, worst {max(errors):.0%}")
    with open(out, "w") as file:
        json.dump({"rows": rows, "efficiency": hardware.efficiency.source}, file)


if __name__ == "__main__":
    main()

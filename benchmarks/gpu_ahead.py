"""Fills Triton's cache for this machine's GPU from several processes, without touching the GPU.

What the checks of `gpu_bench.py --smoke` launch comes first, taken from the checks themselves
(`gpu_absent.py`), so that their time is for running; then, unless `--checks` is given, every kernel
of the dry run's models. Code is compiled and not read. How long a cold
machine takes is a number:

    TRITON_CACHE_DIR=$(mktemp -d) python benchmarks/gpu_ahead.py --checks --architecture sm_90
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

import torch
from gpu_absent import WORKERS, compiled, names
from gpu_checks import SMOKE
from gpu_dry import ARCHITECTURES, MODELS, launched

SHARDS = 16
CHECKS = [f"checks {number}" for number in range(SHARDS)]
"""Parts that compile the checks."""
DRY = [f"model {number}" for number in range(len(MODELS))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--checks", action="store_true", help="for the checks of --smoke only")
    parser.add_argument("--architecture", choices=ARCHITECTURES, help="that of the device")
    parser.add_argument("--part", choices=[*CHECKS, *DRY], help="this one, in this process")
    arguments = parser.parse_args()
    name = arguments.architecture or device_architecture()
    if name not in ARCHITECTURES:
        print(f"no target {name}", file=sys.stderr)
        return 0
    if arguments.part:
        print(compile_part(arguments.part, name))
        return 0
    parts = CHECKS if arguments.checks else [*CHECKS, *DRY]
    begin = time.perf_counter()
    late = run_parts(parts, name, begin + arguments.seconds)
    seconds = time.perf_counter() - begin
    done = f"{len(parts) - late} of {len(parts)} parts compiled"
    print(f"{done} in {seconds:.0f} s on {os.cpu_count()} cores", file=sys.stderr)
    return 0


def device_architecture() -> str:
    """Architecture of the GPU here, as `compiling` names it."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def run_parts(parts: list[str], architecture: str, deadline: float) -> int:
    """Each part in a process of its own; → how many had not ended at the deadline and were killed,
    whatever they had started with them."""
    running = {
        part: subprocess.Popen(
            [sys.executable, __file__, "--architecture", architecture, "--part", part],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for part in parts
    }
    late = 0
    for part, process in running.items():
        try:
            _, errors = process.communicate(timeout=max(0.1, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            late += 1
            continue
        if process.returncode:
            print(f"{part}: {errors[-400:]}", file=sys.stderr)
    return late


def compile_part(part: str, architecture: str) -> int:
    """Everything that one part launches; → how many kernels, those in the cache among them."""
    torch.set_num_threads(1)
    kind, number = part.split()
    if kind == "model":
        steps = launched(architecture, MODELS[int(number) : int(number) + 1])
        return len({each.machine for _, _, found in steps for each in found})
    there = [*names(architecture), *WORKERS]
    wanted = [name for name in SMOKE if name in there][int(number) :: SHARDS]
    checks = compiled(architecture, wanted)
    return len({each.machine for _, found in checks for each in found})


if __name__ == "__main__":
    sys.exit(main())

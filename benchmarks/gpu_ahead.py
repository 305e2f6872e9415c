"""Fills Triton's cache for this machine's GPU from several processes, without touching the GPU.

What the checks of early starts launch comes first, started early and not, so that their time is for
running; then, unless `--checks` is given, every kernel of the dry run's models. Code is compiled
and not read.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from unittest.mock import patch

import torch
from gpu_aot import compiling
from gpu_dry import ARCHITECTURES, KV, MODELS, launched
from gpu_models import build, make_batch, make_cache, windows_of
from gpu_paths import EARLY_MODELS, EARLY_STEPS, EARLY_SWITCHES
from gpu_sass import unread

from headrace.kernels.triton.operators import TritonOperators
from headrace.kernels.triton.table import Table

CHECKS = [f"early {number}" for number in range(len(EARLY_MODELS) * len(EARLY_SWITCHES))]
DRY = [f"model {number}" for number in range(len(MODELS))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=70)
    parser.add_argument("--checks", action="store_true", help="for the checks of early starts only")
    parser.add_argument("--architecture", choices=ARCHITECTURES, help="that of the device")
    parser.add_argument("--part", choices=[*CHECKS, *DRY], help="this one, in this process")
    arguments = parser.parse_args()
    name = arguments.architecture or device_architecture()
    if name not in ARCHITECTURES:
        print(f"no target {name}", file=sys.stderr)
        return 0
    if arguments.part:
        compile_part(arguments.part, name)
        return 0
    parts = CHECKS if arguments.checks else [*CHECKS, *DRY]
    late = run_parts(parts, name, time.perf_counter() + arguments.seconds)
    print(f"{len(parts) - late} of {len(parts)} parts compiled", file=sys.stderr)
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


def compile_part(part: str, architecture: str) -> None:
    """Everything that one part launches."""
    torch.set_num_threads(1)
    kind, number = part.split()
    if kind == "model":
        for _ in launched(architecture, MODELS[int(number) : int(number) + 1], read=unread):
            pass
        return
    model, switch = divmod(int(number), len(EARLY_SWITCHES))
    arch, weights, kv = EARLY_MODELS[model]
    operators = TritonOperators(
        torch.bfloat16,
        architecture=architecture,
        quantise="fp8" if weights == "fp8" else "auto",
    )
    with (
        torch.inference_mode(),
        patch.object(Table, "early", lambda _: EARLY_SWITCHES[switch]),
        compiling(architecture, read=unread),
    ):
        built = build(arch, operators, device="meta", weights=weights, max_context=512)
        cache = make_cache(arch, 64, "meta", KV[kv])
        for step in EARLY_STEPS:
            built.forward(operators, make_batch(step, windows_of(arch), "meta"), cache)
        operators.warm_draws(torch.empty(8, arch.vocab_size, device="meta"))


if __name__ == "__main__":
    sys.exit(main())

"""Fills Triton's cache for this machine's GPU from several processes, without touching the GPU."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpu_dry import ARCHITECTURES, MODELS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=70)
    arguments = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    name = f"sm_{major}{minor}"
    if name not in ARCHITECTURES:
        print(f"no target {name}", file=sys.stderr)
        return 0
    deadline = time.perf_counter() + arguments.seconds
    script = Path(__file__).with_name("gpu_dry.py")
    running = [
        subprocess.Popen(
            [sys.executable, str(script), "--architecture", name, "--model", str(number)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(len(MODELS))
    ]
    late = 0
    for number, process in enumerate(running):
        try:
            _, errors = process.communicate(timeout=max(0.1, deadline - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            late += 1
            continue
        # Faults of the dry run are its own affair; that it ended early is ours.
        if process.returncode not in (0, 1) or "Error" in errors:
            print(f"model {number}: {errors[-400:]}", file=sys.stderr)
    print(f"{len(running) - late} of {len(running)} models compiled", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

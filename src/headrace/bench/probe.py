"""Measurement of this machine in a separate process (`python -m headrace.bench.probe`), for torch.

Prints one JSON object: read bandwidth, rates of products by type, thread scaling, launch cost.
Every figure is the best of several rounds, since a ceiling is the machine's best, not its mean.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from ..kernels.cpu.library import LibraryAbsent, Team, allocate

STREAM_BYTES = 384 * 2**20
CACHED_BYTES = 8 * 2**20
SIZE = 1024
ROUNDS = 5


def best(work: Callable[[], Any], seconds: float = 0.25) -> float:
    """Return the least seconds of one call."""
    work()
    found = float("inf")
    for _ in range(ROUNDS):
        calls, begin = 0, time.perf_counter()
        while True:
            work()
            calls += 1
            spent = time.perf_counter() - begin
            if spent >= seconds / ROUNDS:
                break
        found = min(found, spent / calls)
    return found


def read_bandwidth(size: int) -> float:
    """Measure B/s of summing an fp32 array: one read of each byte, nothing written."""
    data = torch.ones(size // 4)
    return size / best(data.sum)


def product_rate(dtype: torch.dtype) -> float:
    """Measure FLOP/s of a square product."""
    left = torch.ones(SIZE, SIZE, dtype=dtype)
    right = torch.ones(SIZE, SIZE, dtype=dtype)
    return 2 * SIZE**3 / best(lambda: left @ right.t())


def integer_rate() -> float:
    """Measure OP/s of an int8 product with int32 sums."""
    left = torch.ones(SIZE, SIZE, dtype=torch.int8)
    right = torch.ones(SIZE, SIZE, dtype=torch.int8)
    return 2 * SIZE**3 / best(lambda: torch._int_mm(left, right))


def launch_seconds() -> float:
    """Measure the seconds of one small operator called from Python."""
    data = torch.ones(8)
    return best(lambda: data.add_(0.0), 0.05)


def kernel_probes(threads: int) -> tuple[float, float]:
    """Return (B/s, int8 OP/s) by our own kernels' probes; zeros if they are not built."""
    try:
        team = Team(threads)
    except LibraryAbsent:
        return 0.0, 0.0
    data = allocate(STREAM_BYTES)
    data.fill(1)
    bandwidth = max(team.read_bandwidth(data) for _ in range(ROUNDS))
    return bandwidth, max(team.int8_rate() for _ in range(ROUNDS))


def at_threads(threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    bandwidth, integer = kernel_probes(threads)
    return {
        "bandwidth": max(bandwidth, read_bandwidth(STREAM_BYTES)),
        "float32": product_rate(torch.float32),
        "int8": max(integer, integer_rate()),
    }


def measure(threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    result: dict[str, Any] = {
        "threads": threads,
        "cache_bandwidth": read_bandwidth(CACHED_BYTES),
        "bfloat16": product_rate(torch.bfloat16),
        "launch_seconds": launch_seconds(),
        "scaling": {str(n): at_threads(n) for n in sorted({1, threads})},
    }
    result.update(result["scaling"][str(threads)])
    return result


def main() -> None:
    with torch.inference_mode():
        print(json.dumps(measure(int(sys.argv[1]))))


if __name__ == "__main__":
    main()

"""What sampling costs per row beyond the argmax: numpy (`kernels.host_sampling`) against torch.

Run: `python benchmarks/host_sampling.py [--json FILE]`. One row of a vocabulary of 151,936, one
thread; medians in microseconds, the two taken in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from headrace.kernels import host_sampling, sampling
from headrace.kernels.draws import DrawParameters

VOCABULARY, ROUNDS = 151_936, 60


def in_turns(ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, float]:
    times: dict[str, list[float]] = {"numpy_us": [], "torch_us": []}
    for _ in range(ROUNDS):
        for name, call in zip(times, (ours, theirs), strict=True):
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: round(statistics.median(values) * 1e6) for name, values in times.items()}


def parts() -> dict[str, dict[str, float]]:
    numbers = np.random.default_rng(0)
    logits = (numbers.standard_normal((1, VOCABULARY)) * 3).astype(np.float32)
    tensor, token, row = torch.from_numpy(logits.copy()), np.array([17]), np.array([0])
    own = torch.from_numpy(token)
    found = {}
    for top in (0, 1, 20):
        found[f"log-probabilities, {top} most likely"] = in_turns(
            lambda top=top: host_sampling.log_probabilities(logits, token, top),
            lambda top=top: sampling.log_probabilities(tensor, own, top),
        )
    for length in (200, 2_000, 32_000):
        tokens = numbers.integers(0, VOCABULARY, (1, length)).astype(np.int32)
        columns = [np.array([value], np.float32) for value in (1.2, 0.1, 0.1)]
        arrays = [tokens, np.array([length // 2]), np.array([length]), *columns]
        tensors = [torch.from_numpy(array) for array in arrays]
        found[f"penalties, {length:,} tokens"] = in_turns(
            lambda arrays=arrays: host_sampling.penalise_rows(logits, row, *arrays),
            lambda tensors=tensors: sampling.penalise(tensor, *tensors),
        )
    types = (np.float32, np.int64, np.float32, np.float32, np.float64)
    columns = [np.array([v], t) for v, t in zip((1, 0, 0.95, 0, 0.3), types, strict=True)]
    found["draw, top-p 0.95 of a flat row"] = in_turns(
        lambda: host_sampling.draw(logits / 20, DrawParameters(*columns)),
        lambda: sampling.draw(tensor / 20, DrawParameters(*map(torch.from_numpy, columns))),
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = parts()
    for name, each in found.items():
        print(f"{name:36}", *(f"{key} {value:7.0f}" for key, value in each.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

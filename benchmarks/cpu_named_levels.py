"""Products of dense bf16 weights at the levels that serve by name, beside the best of the others.

    python benchmarks/cpu_named_levels.py [--rows 1 8 64 512] [--rounds 9] [--json FILE]

The products of a layer of Qwen2.5-0.5B, levels in turns, by one thread in *processor time*, so
that others who want the core are not counted; what they do to its caches and clock is. A level
that this processor lacks is left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from headrace.kernels.cpu import library
from headrace.kernels.cpu.operators import CpuOperators
from headrace.kernels.cpu.panels import pack
from headrace.kernels.weights import DenseWeight, StackedWeight

PRODUCTS = {
    "q, k, v": (896, (896, 128, 128)),
    "output": (896, (896,)),
    "gate, up": (896, (4864, 4864)),
    "down": (4864, (896,)),
}
"""K and the outputs of each part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    best = library.level()
    named = [
        each for each in (library.PAIRS, library.TILES, library.ROUNDED) if library.level(each)
    ]
    operators = {level: CpuOperators(1, level) for level in [str(best), *named]}
    team = operators[str(best)].team
    found = []
    for rows in arguments.rows:
        for name, (width, outs) in PRODUCTS.items():
            parts = (torch.randn(out, width).bfloat16() for out in outs)
            weight = StackedWeight(tuple(pack(DenseWeight(part), team) for part in parts))
            x = torch.randn(rows, width)
            times: dict[str, list[float]] = {level: [] for level in operators}
            for _ in range(arguments.rounds):
                for level in random.sample(list(operators), len(operators)):
                    begin = time.thread_time()
                    operators[level].linear(x, weight, None)
                    times[level].append(1e3 * (time.thread_time() - begin))
            work = 2e-6 * rows * width * sum(outs)
            for level, each in times.items():
                ms = statistics.median(each)
                ratio = statistics.median(
                    ours / other for ours, other in zip(times[str(best)], each, strict=True)
                )
                found.append({"rows": rows, "product": name, "level": level, "ms": ms})
                found[-1] |= {"gflops": work / ms, "times_as_fast": ratio}
                print(
                    f"{rows:4} {name:9} {level:12}{ms:9.3f} ms{work / ms:7.0f} GFLOP/s x{ratio:.2f}"
                )
    if arguments.json:
        document = {"made": datetime.now(UTC).isoformat(), "sources": library.sources()}
        arguments.json.write_text(json.dumps({**document, "products": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

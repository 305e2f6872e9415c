"""Attention alone, by two builds of the CPU library in turns in one process.

Run: `python benchmarks/cpu_attention.py OLD.so NEW.so [--heads 4 --kv-heads 1 --size 256] CASE…`.
A case is ROWSxCONTEXT (decoding) or COUNT@START (a part of a prompt), with wWINDOW behind it where
only the latest so many positions are seen. Each layer has KV of its own (bf16, blocks of 16 in a
random order), and other memory is read between the runs, as weights are in a step.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from pathlib import Path

import torch
from cpu_libraries import team_of

from headrace.kernels.cpu import emit
from headrace.kernels.cpu.emit import NOT_QUANTISED, matrix
from headrace.kernels.cpu.library import allocate
from headrace.kernels.cpu.records import ROWS_N, HrStep
from headrace.kernels.cpu.step import fill_step
from headrace.kernels.operators import GroupBatch, KvLayer, StepBatch

BLOCK = 16


def batch_of(case: str) -> tuple[StepBatch, int]:
    """The rows of a case on blocks in a random order → they, and how many blocks there are."""
    found = re.fullmatch(r"(\d+)([x@])(\d+)(?:w(\d+))?", case)
    if found is None:
        raise SystemExit(
            f"{case!r} is no case: ROWSxCONTEXT or COUNT@START, with or without wWINDOW"
        )
    first, second = int(found[1]), int(found[3])
    rows, start, count = (1, second, first) if found[2] == "@" else (first, second - 1, 1)
    each = -(-(start + count) // BLOCK)
    tables = torch.randperm(rows * each).int().view(rows, each) + 1
    positions = torch.arange(start, start + count).repeat(rows)
    group = GroupBatch(tables, torch.zeros(rows * count, dtype=torch.int64), int(found[4] or 0))
    batch = StepBatch(
        tokens=torch.zeros(rows * count, dtype=torch.int64),
        positions=positions,
        query_starts=(torch.arange(rows + 1) * count).int(),
        lengths=torch.full((rows,), start + count, dtype=torch.int32),
        groups=[group],
        sample_rows=torch.arange(1, rows + 1) * count - 1,
        max_count=count,
        max_length=start + count,
    )
    return batch, rows * each + 1


def on_huge_pages(data: torch.Tensor) -> torch.Tensor:
    """A copy where the engine keeps its KV."""
    copy = torch.from_numpy(allocate(data.nbytes)).view(data.dtype).view(data.shape)
    return copy.copy_(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="append what was measured to this list")
    arguments = parser.parse_args()
    teams = {each: team_of(getattr(arguments, each)) for each in ("old", "new")}
    other = allocate(128 << 20)
    other[:] = 1
    measured = []
    heads, size = arguments.heads, arguments.size
    bandwidth = teams["new"].read_bandwidth(other) / 1e9
    print(f"one read of 128 MiB: {bandwidth:.0f} GB/s")
    for case in arguments.cases:
        batch, blocks = batch_of(case)
        shape = (blocks, arguments.kv_heads, BLOCK, size)
        pages = [torch.randn(shape).bfloat16() for _ in range(2)]
        layers = [
            KvLayer(*(on_huge_pages(page) for page in pages)) for _ in range(arguments.layers)
        ]
        q = torch.randn(len(batch.positions), heads * size)
        y = torch.empty_like(q)
        records = [
            emit.attention(
                emit.kv(layer, heads, arguments.kv_heads, 0),
                matrix(q),
                matrix(y),
                NOT_QUANTISED,
                size**-0.5,
                None,
                ROWS_N,
            )
            for layer in layers
        ]
        program, step = emit.program(records), fill_step(HrStep(), batch)
        times: dict[str, list[float]] = {name: [] for name in teams}
        results = {}
        for number in range(1 + arguments.rounds):
            for name in random.sample(list(teams), len(teams)):
                other.max()
                began = time.perf_counter()
                teams[name].run(program, len(records), step)
                if number:  # The first round only warms up.
                    times[name].append(1e3 * (time.perf_counter() - began))
                results[name] = y.clone()
        old, new = (statistics.median(times[name]) for name in teams)
        ratios = sorted(b / a for a, b in zip(*times.values(), strict=True))
        away = float((results["old"] - results["new"]).abs().max() / results["old"].std())
        print(
            f"{case:<14}{old:9.3f}{new:9.3f} ms  x{new / old:.3f} "
            f"(rounds {ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}), "
            f"largest difference {away:.2g} of the deviation",
            flush=True,
        )
        measured.append(
            {
                "case": case,
                "heads": heads,
                "kv_heads": arguments.kv_heads,
                "size": size,
                "layers": arguments.layers,
                "rounds": arguments.rounds,
                "old_ms": round(old, 4),
                "new_ms": round(new, 4),
                "gigabytes_a_second": round(bandwidth, 1),
            }
        )
    if arguments.json:
        before = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.write_text(json.dumps([*before, *measured], indent=1) + "\n")


if __name__ == "__main__":
    main()

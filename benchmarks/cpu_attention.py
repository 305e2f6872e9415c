"""Attention alone, over types of KV and by builds of the CPU library, in turns in one process.

Run: `python benchmarks/cpu_attention.py [--kv bfloat16 int8 k8v4] [--against OLD.so] CASE…`; the
shape (--heads, --kv-heads, --size, --layers) is the default model's.
A case is ROWSxCONTEXT (decoding) or COUNT@START (a part of a prompt), with wWINDOW behind it where
only the latest so many positions are seen. Each layer has KV of its own (by chance, blocks of 16 in
a random order), and other memory is read between the runs, as weights are in a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cpu_libraries import team_of

from headrace.base.graph import AttentionSpec
from headrace.kernels.cpu import emit
from headrace.kernels.cpu.emit import NOT_QUANTISED, matrix
from headrace.kernels.cpu.library import Team, allocate
from headrace.kernels.cpu.records import ROWS_N, HrStep
from headrace.kernels.cpu.step import fill_step
from headrace.kernels.operators import GroupBatch, KvLayer, StepBatch

BLOCK = 16
BYTES: dict[str, Callable[[int], float]] = {
    "bfloat16": lambda size: 4 * size,
    "int8": lambda size: 2 * size + 4,
    "k8v4": lambda size: 1.5 * size + 4,
}
"""What K and V of a position and KV head take, by the head's size."""


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


def on_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory such as the engine keeps its KV in."""
    size = torch.empty((), dtype=dtype).element_size()
    room = torch.from_numpy(allocate(size * math.prod(shape)))
    return room.view(dtype).view(shape)


def layer_of(kv: str, blocks: int, kv_heads: int, size: int) -> KvLayer:
    """KV by chance: of codes any bytes, and scales that are all one."""
    shape = (blocks, kv_heads, BLOCK, size)
    if kv == "bfloat16":
        return KvLayer(*(on_huge_pages(shape, torch.bfloat16).normal_() for _ in range(2)))
    k = on_huge_pages(shape, torch.int8).random_(-128, 128)
    if kv == "int8":
        v = on_huge_pages(shape, torch.int8).random_(-128, 128)
    else:
        v = on_huge_pages((*shape[:-1], size // 2), torch.uint8).random_(0, 256)
    scales = [on_huge_pages(shape[:-1], torch.bfloat16).fill_(1 / 128) for _ in range(2)]
    return KvLayer(k, v, *scales)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--against", type=Path, help="another build, in turns with the one here")
    parser.add_argument("--kv", nargs="+", default=["bfloat16"], choices=BYTES)
    parser.add_argument("--heads", type=int, default=14)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="append what was measured to this list")
    arguments = parser.parse_args()
    teams = {"here": Team(os.cpu_count() or 1)}
    if arguments.against:
        teams["against"] = team_of(arguments.against)
    other = allocate(128 << 20)
    other[:] = 1
    measured = []
    heads, kv_heads, size = arguments.heads, arguments.kv_heads, arguments.size
    for case in arguments.cases:
        batch, blocks = batch_of(case)
        q = torch.randn(len(batch.positions), heads * size)
        y = torch.empty_like(q)
        programs = {}
        for kv in arguments.kv:
            layers = [layer_of(kv, blocks, kv_heads, size) for _ in range(arguments.layers)]
            records = [
                emit.attention(
                    emit.kv(layer, heads, kv_heads, 0),
                    matrix(q),
                    matrix(y),
                    NOT_QUANTISED,
                    None,
                    AttentionSpec(0, heads, kv_heads, size, size**-0.5),
                    ROWS_N,
                )
                for layer in layers
            ]
            programs[kv] = emit.program(records), layers
        step = fill_step(HrStep(), batch)
        ways = list(itertools.product(arguments.kv, teams))
        times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        rates = []
        for number in range(1 + arguments.rounds):
            for way in random.sample(ways, len(ways)):
                other.max()
                began = time.perf_counter()
                teams[way[1]].run(programs[way[0]][0], arguments.layers, step)
                if number:  # The first round only warms up.
                    times[way].append(1e3 * (time.perf_counter() - began))
            rates.append(teams["here"].read_bandwidth(other) / 1e9)
        rate = statistics.median(rates)
        first = times[ways[0]]
        for (kv, build), taken in times.items():
            read = arguments.layers * int(batch.lengths.sum()) * kv_heads * BYTES[kv](size)
            ratios = sorted(b / a for a, b in zip(first, taken, strict=True))
            found = {
                "case": case,
                "kv": kv,
                "build": build,
                "ms, median": round(statistics.median(taken), 4),
                "ms, least": round(min(taken), 4),
                "of the first, median": round(statistics.median(ratios), 3),
                "of the first, quarters": [
                    round(ratios[len(ratios) * part // 4], 3) for part in (1, 3)
                ],
                "KV, MB": round(read / 1e6, 2),
                "ms at one read's rate": round(read / rate / 1e6, 4),
                "one read, GB/s": round(rate, 1),
            }
            print(json.dumps(found), flush=True)
            shape = {"heads": heads, "kv_heads": kv_heads, "size": size}
            measured.append(found | shape | {"layers": arguments.layers})
    if arguments.json:
        before = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
        arguments.json.write_text(json.dumps([*before, *measured], indent=1) + "\n")


if __name__ == "__main__":
    main()

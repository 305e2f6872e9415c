"""Tuner that writes a row of `table.json` for the GPU on which it runs.

    python -m headrace.kernels.triton.tune [--only KERNEL …] [--seconds 500] [--write FILE]

For every bucket of every kernel each candidate is run on the shapes of an 8B model and the fastest
is kept. Candidates that do not start (shared memory, registers) are dropped. Serving never tunes:
the table is part of the package, and its cuts are part of the results.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ..attention_lists import plan_step
from ..attention_plan import Planner
from ..fuse import Norm
from ..operators import GroupBatch, HostStep, KvLayer, StepBatch
from ..weights import DenseWeight, PackedWeight
from .attention_decode import DecodeConfig, attention_decode
from .attention_prefill import PrefillConfig, attention_prefill
from .gated import gated
from .library import ScaledProducts
from .norm import rms_norm
from .packed import tile_weight
from .product_fp8 import quantise_rows, quantise_weight
from .product_packed import ProductConfig, product_packed
from .product_packed_skinny import PackedSkinnyConfig, product_packed_skinny
from .product_skinny import SkinnyConfig, product_skinny
from .split import make_tickets
from .table import PATH, Table, architecture, load_table

Measure = Callable[[Callable[[], object]], float]
"""Seconds of one run."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes on which kernels are tuned."""

    out: int = 28_672
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    context: int = 4096
    entries: int = 32
    chunk: int = 2048


@dataclass(frozen=True, slots=True)
class Problem:
    """One bucket: its place in the table, the candidates, and a function that runs one."""

    kernel: str
    up_to: int | None
    candidates: list[Any]
    run: Callable[[Any], object]


def problems(table: Table, shapes: Shapes, device: str, dtype: torch.dtype) -> Iterator[Problem]:
    """Yield every bucket that is tuned, the one farthest from its limit first; the configuration in
    use is always among its candidates."""
    for width, up_to in ((128, 128), (64, 64), (256, 256)):
        for coded in (True, False):
            yield from _attention(table, shapes, width, up_to, device, dtype, coded)
    weights = _weights(shapes, device)
    for bucket in load_table()[table.architecture]["product_packed"]:
        if bucket.get("library"):
            continue
        rows = bucket["up_to"]
        x = torch.randn(rows, shapes.width, device=device).to(dtype)
        now = table.packed(rows)
        tried = [
            replace(now, rows=r, outs=o, warps=w, stages=s, programs=p)
            for r, o, w, s, p in product(
                {now.rows, max(16, now.rows // 2)},
                (32, 64, 128),
                (4, 8),
                (3, 4),
                {now.programs, 2 * now.programs},
            )
        ]

        def run(config: ProductConfig, x: torch.Tensor = x) -> object:
            return [product_packed(x, weight, None, config) for weight in weights]

        yield Problem("product_packed", rows, _with(now, tried), run)
    yield from _skinny(table, shapes, device, dtype)
    yield from _coded_skinny(table, shapes, device)
    yield from _packed_skinny(table, shapes, device, dtype)


def _skinny(table: Table, shapes: Shapes, device: str, dtype: torch.dtype) -> Iterator[Problem]:
    """Yield dense products of few rows, with gate and norm; the library with separate kernels is
    among the candidates."""
    weight = DenseWeight(torch.randn(shapes.out, shapes.width, device=device).to(dtype))
    gain = torch.rand(shapes.width, device=device).to(dtype)
    tickets = make_tickets(torch.device(device))
    for bucket in load_table()[table.architecture]["product_skinny"]:
        rows = bucket["up_to"]
        if rows is None:
            continue
        x = torch.randn(rows, shapes.width, device=device).to(dtype)
        now = table.skinny(rows)
        tile = 4 if rows <= 4 else 16
        tried = [
            SkinnyConfig(o, i, w, s, p, tile, n)
            for o, i, w, s, p, n in product(
                (16, 32), (128, 256), (4, 8), (3, 4), (264, 528), (False, True)
            )
        ]

        def run(config: SkinnyConfig, x: torch.Tensor = x) -> object:
            apart = x if config.norm and not config.library else rms_norm(x, gain, 1e-5, 0.0)
            if config.library:
                return gated(functional.linear(apart, weight.data), "silu")
            return product_skinny(
                apart,
                weight,
                None,
                config,
                tickets,
                activation="silu",
                norm=Norm(gain, 1e-5, 0.0) if config.norm else None,
            )

        yield Problem("product_skinny", rows, _with(now, [*tried, SkinnyConfig(library=True)]), run)


def _coded_skinny(table: Table, shapes: Shapes, device: str) -> Iterator[Problem]:
    """Yield products of few rows of e4m3 with a scale per row, if the device has them."""
    if table.architecture == "sm_80":
        return
    weight = quantise_weight(torch.randn(shapes.out, shapes.width, device=device))
    tickets, scaled = make_tickets(torch.device(device)), ScaledProducts()
    for bucket in load_table()[table.architecture]["product_skinny_coded"]:
        rows = bucket["up_to"]
        if rows is None:
            continue
        codes, scales = quantise_rows(torch.randn(rows, shapes.width, device=device), blocked=False)
        now = table.skinny(rows, coded=True)
        tried = [
            SkinnyConfig(o, i, w, s, p, max(16, now.rows))
            for o, i, w, s, p in product((64, 128), (128, 256), (4, 8), (3, 4), (264, 528, 1056))
        ]

        def run(
            config: SkinnyConfig, codes: torch.Tensor = codes, scales: torch.Tensor = scales
        ) -> object:
            if config.library:
                return scaled.product(codes, scales, weight)
            dtype = torch.bfloat16
            return product_skinny(codes, weight, None, config, tickets, dtype, scales=scales)

        away = SkinnyConfig(library=True)
        yield Problem("product_skinny_coded", rows, _with(now, [*tried, away]), run)


def _packed_skinny(
    table: Table, shapes: Shapes, device: str, dtype: torch.dtype
) -> Iterator[Problem]:
    """Yield packed products of few rows with their gate; one candidate is `product_packed`."""
    weights = _weights(shapes, device)
    tickets = make_tickets(torch.device(device))
    for bucket in load_table()[table.architecture]["product_packed_skinny"]:
        rows = bucket["up_to"]
        if rows is None:
            continue
        x = torch.randn(rows, shapes.width, device=device).to(dtype)
        now = table.packed_skinny(rows)
        tried = [
            PackedSkinnyConfig(o, w, s, p, 8 if rows <= 8 else 16)
            for o, w, s, p in product((32, 64, 128), (1, 2), (4, 6), (264, 528, 1056))
        ]

        def run(config: PackedSkinnyConfig, x: torch.Tensor = x, rows: int = rows) -> object:
            if not config.serves:
                made = [product_packed(x, weight, None, table.packed(rows)) for weight in weights]
                return [gated(each, "silu") for each in made]
            around = partial(product_packed_skinny, activation="silu")
            return [around(x, weight, None, config, tickets) for weight in weights]

        away = PackedSkinnyConfig(serves=False)
        yield Problem("product_packed_skinny", rows, _with(now, [*tried, away]), run)


def _attention(
    table: Table,
    shapes: Shapes,
    width: int,
    up_to: int | None,
    device: str,
    dtype: torch.dtype,
    coded: bool,
) -> Iterator[Problem]:
    """Yield attention, decoding and prefill; `coded`: over a cache in 8-bit codes."""
    single, kv = _batch(shapes, [(shapes.context - 1, 1)] * shapes.entries, width, device, dtype)
    chunk, chunk_kv = _batch(shapes, [(0, shapes.chunk)], width, device, dtype)
    suffix = "_coded" * coded
    if coded:
        kind = torch.int8 if table.architecture == "sm_80" else torch.float8_e4m3fn
        kv, chunk_kv = _codes(kv, kind), _codes(chunk_kv, kind)

    def query(batch: StepBatch) -> torch.Tensor:
        return torch.randn(len(batch.tokens), shapes.heads, width, device=device).to(dtype)

    tickets = make_tickets(torch.device(device))
    if up_to != 64:  # The table's first bucket of decode attention reaches to 128.
        q = query(single)
        single_plan = plan_step(single, Planner(shapes.kv_heads, [None]))

        def decode(config: DecodeConfig) -> object:
            out = torch.empty_like(q)
            view = single.groups[0]
            attention_decode(q, kv, single_plan, 0, view, out, 0.1, None, config, tickets)
            return out

        now = table.decode(width, coded=coded)
        bounds, ahead = ((None,), (False, True)) if coded else ((None, 128), (False,))
        tried = [
            DecodeConfig(*cut) for cut in product((32, 64, 128), (4, 8), (2, 3, 4), bounds, ahead)
        ]
        yield Problem("attention_decode" + suffix, up_to, _with(now, tried), decode)
    many = query(chunk)
    chunk_plan = plan_step(chunk, Planner(shapes.kv_heads, [None]))

    def prefill(config: PrefillConfig) -> object:
        out = torch.empty_like(many)
        attention_prefill(
            many,
            chunk_kv,
            chunk_plan,
            chunk.groups[0],
            out,
            0.1,
            None,
            config,
            longest=shapes.chunk,
        )
        return out

    cuts = [
        PrefillConfig(r, t, w, s)
        for r, t, w, s in product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    ]
    now_cut = table.prefill(width, coded=coded)
    yield Problem("attention_prefill" + suffix, up_to, _with(now_cut, cuts), prefill)


def tune(found: Iterator[Problem], measure: Measure) -> dict[str, list[dict[str, Any]]]:
    """Return each kernel's tuned buckets."""
    best: dict[str, list[dict[str, Any]]] = {}
    for problem in found:
        times = {}
        for config in problem.candidates:
            try:
                times[config] = measure(lambda p=problem, c=config: p.run(c))  # type: ignore[misc]
            except Exception as fault:  # noqa: BLE001 - a candidate that does not start drops out
                print(f"{problem.kernel} {config}: {type(fault).__name__}")
        assert times, f"no candidate of {problem.kernel} ran"
        winner = min(times, key=lambda config: times[config])
        now = times.get(problem.candidates[0])
        print(f"{problem.kernel} up to {problem.up_to}: {winner} {times[winner]:.2e} s, was {now}")
        best.setdefault(problem.kernel, []).append({"up_to": problem.up_to, **asdict(winner)})
    return best


def merge(table: dict[str, Any], architecture: str, best: dict[str, list[dict[str, Any]]]) -> None:
    """Put tuned buckets in the place of those with the same bound; the others stay."""
    for kernel, buckets in best.items():
        tuned = {bucket["up_to"]: bucket for bucket in buckets}
        row = table[architecture][kernel]
        unknown = set(tuned) - {bucket["up_to"] for bucket in row}
        assert not unknown, f"{kernel} has no bucket up to {unknown}"
        table[architecture][kernel] = [tuned.get(b["up_to"], b) for b in row]


def tune_all(
    found: Iterator[Problem],
    architecture: str,
    measure: Measure,
    path: Path | None,
    only: Sequence[str] | None,
    seconds: float,
) -> None:
    """Tune problem by problem; the table is written after each, so that an interrupted run is
    kept."""
    table = json.loads(PATH.read_text())
    end = time.perf_counter() + seconds
    for problem in found:
        if only and problem.kernel not in only:
            continue
        if time.perf_counter() > end:
            print(f"no time: {problem.kernel} up to {problem.up_to}")
            continue
        merge(table, architecture, tune(iter([problem]), measure))
        if path is not None:
            path.write_text(json.dumps(table, indent=1) + "\n")


def _with(now: Any, tried: list[Any]) -> list[Any]:
    return [now, *(config for config in dict.fromkeys(tried) if config != now)]


def _weights(shapes: Shapes, device: str) -> list[Any]:
    """Make weights of four bits, in the groups of files with blocks and of files with tensors: one
    cut serves both."""
    size, found = (shapes.out, shapes.width), []
    for group in (32, 128):
        codes = torch.randint(0, 16, size, dtype=torch.uint8, device=device)
        scales = torch.rand(shapes.out, shapes.width // group, device=device)
        found.append(tile_weight(PackedWeight(codes, scales, -8 * scales, 4, group, size)))
    return found


def _batch(
    shapes: Shapes, entries: list[tuple[int, int]], width: int, device: str, dtype: torch.dtype
) -> tuple[StepBatch, KvLayer]:
    block = 16
    lengths = torch.tensor([start + count for start, count in entries], dtype=torch.int32)
    counts = torch.tensor([count for _, count in entries])
    used = -(-int(lengths.max()) // block)
    tables = 1 + torch.arange(len(entries) * used, dtype=torch.int32).view(-1, used)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    empty = torch.zeros(int(bounds[-1]), dtype=torch.int64, device=device)
    batch = StepBatch(
        empty,
        empty,
        bounds.to(torch.int32).to(device),
        lengths.to(device),
        [GroupBatch(tables.to(device), empty, None)],
        bounds[1:].to(device) - 1,
        int(counts.max()),
        int(lengths.max()),
        host=HostStep(counts.numpy(), lengths.numpy(), bounds[1:].numpy() - 1),
    )
    shape = (len(entries) * used + 1, shapes.kv_heads, block, width)
    k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    return batch, KvLayer(k, v)


def _codes(kv: KvLayer, kind: torch.dtype) -> KvLayer:
    """Return the same cache in 8-bit codes of a thirty-second each."""
    scales = torch.full(kv.k.shape[:3], 1 / 32, dtype=torch.bfloat16, device=kv.k.device)
    k, v = ((values * 32).to(kind) for values in (kv.k, kv.v))
    return KvLayer(k, v, scales, scales.clone())


def on_gpu(run: Callable[[], object]) -> float:
    """Return the median of twenty runs, the second-level cache swept before each."""
    run()
    sweep = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    pairs = []
    for _ in range(20):
        sweep.zero_()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        run()
        last.record()
        pairs.append((first, last))
    torch.cuda.synchronize()
    times: list[float] = sorted(first.elapsed_time(last) for first, last in pairs)
    return times[len(times) // 2] / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the table's row of this GPU.")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=PATH, help="write the table, table.json unless named"
    )
    parser.add_argument("--only", nargs="+", help="kernels as the table names them")
    parser.add_argument("--seconds", type=float, default=500, help="begin nothing after so many")
    arguments = parser.parse_args()
    name = architecture(torch.device("cuda"))
    found = problems(Table(name), Shapes(), "cuda", torch.bfloat16)
    with torch.inference_mode():
        tune_all(found, name, on_gpu, arguments.write, arguments.only, arguments.seconds)


if __name__ == "__main__":
    main()

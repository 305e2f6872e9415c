"""The CPU kernels at a model's shapes, as shares of ceilings measured in the same run.

    python benchmarks/cpu_kernels.py [--threads 2] [--rounds 7] [--json out.json]
    python benchmarks/cpu_kernels.py --beside OTHER/.venv/bin/python [--turns 5] [--json out.json]

The second form runs the whole steps by this Python and by that of another checkout, processes in
turns, and prints the medians of the ratios within turns.


Products of the default model at 1, 8, 32 and 512 rows, attention, and the recorded whole step.
Before each measurement of a round the two ceilings are measured: bytes a second read from the
*same weights* (where physical memory lies changes the bandwidth: measured up to 2 × between
buffers) and int8 operations a second on registers. The share is of the ceiling that binds: the
longer of bytes / bandwidth and operations / rate. Medians over rounds; other load on the machine
shows as spread between `best` and `median`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from headrace.base.config import DEFAULT_MODEL
from headrace.base.groups import graph_groups
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.kernels.cpu import emit
from headrace.kernels.cpu.emit import QuantisedRows, matrix
from headrace.kernels.cpu.library import Team, allocate
from headrace.kernels.cpu.panels import packed_bytes
from headrace.kernels.cpu.records import ROWS_N, HrStep
from headrace.kernels.program import LOGITS
from headrace.kernels.weights import PanelWeight
from headrace.loader.open import open_model
from headrace.models.registry import describe
from headrace.worker.batch import make_batch
from headrace.worker.options import WorkerOptions
from headrace.worker.worker import Worker

SHAPES = (  # kind, outputs, inputs, how many lie side by side so that no cache holds them
    ("Q5_0", 9728, 896, 12),
    ("Q6_K", 896, 4864, 20),
    ("Q4_K", 896, 4864, 28),
    ("Q8_0", 151_936, 896, 1),
)
ROWS = (1, 8, 32, 512)


@dataclass
class Result:
    what: str
    rows: int
    seconds: float
    best_seconds: float
    bytes: float
    operations: float
    bandwidth: float
    int8_rate: float

    @property
    def share(self) -> float:
        """Share of the ceiling that binds."""
        limit = max(self.bytes / self.bandwidth, self.operations / self.int8_rate)
        return limit / self.seconds

    @property
    def bound(self) -> str:
        memory = self.bytes / self.bandwidth > self.operations / self.int8_rate
        return "bandwidth" if memory else "int8 rate"


def measure(
    team: Team,
    rounds: int,
    weights: torch.Tensor,
    run: object,
    what: str,
    rows: int,
    size: float,
    operations: float,
) -> Result:
    assert callable(run)
    times, bandwidths, rates = [], [], []
    run()
    for _ in range(rounds):
        bandwidths.append(max(team.read_bandwidth(weights) for _ in range(2)))
        rates.append(team.int8_rate(500_000))
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    median = statistics.median
    return Result(
        what, rows, median(times), min(times), size, operations, median(bandwidths), median(rates)
    )


def products(team: Team, rounds: int) -> list[Result]:
    results = []
    for kind, out, width, copies in SHAPES:
        size = packed_bytes(kind, (out, width))
        room = allocate(size * copies)
        room[:] = np.random.default_rng(0).integers(
            0, 60, room.shape, np.uint8
        )  # small fp16 scales: no infinities
        weights = [
            PanelWeight(kind, room[i * size : (i + 1) * size], (out, width)) for i in range(copies)
        ]
        for rows in ROWS if out < 100_000 else ROWS[:3]:
            q, x, y = QuantisedRows(rows, width), torch.randn(rows, width), torch.empty(rows, out)
            step = HrStep(n=rows)
            team.run(emit.program([emit.quantise(matrix(x), q.struct, width, ROWS_N)]), 1, step)
            ops = [emit.linear(q.struct, None, w, None, matrix(y), ROWS_N) for w in weights]
            run, what = partial(team.run, emit.program(ops), copies, step), f"{kind} {out}×{width}"
            read, operations = float(size * copies), 2.0 * rows * out * width * copies
            results.append(measure(team, rounds, room, run, what, rows, read, operations))
    return results


def whole_steps(team_threads: int, rounds: int) -> list[Result]:
    """The recorded step of the default model: decode, prefill, and many sequences."""
    files = open_model(DEFAULT_MODEL)
    arch = files.arch
    options = WorkerOptions(
        kernels="cpu", threads=team_threads, rows=32, step_tokens=2048, max_context=4096
    )
    worker = Worker(files, options)
    kv_dtype = worker._resolved.kv_dtype
    worker.allocate(PoolShape(16, graph_groups(describe(arch), kv_dtype, 600)))
    team: Team = worker.text.operators.providers["linear"].team  # type: ignore[attr-defined]
    parameters = (
        arch.layers
        * arch.hidden
        * (2 * (arch.heads + arch.kv_heads) * arch.head_dim + 3 * arch.intermediate)
    )
    head = arch.vocab_size * arch.hidden
    ends = {
        ref.role: worker.text.model.weights.weight(ref)
        for ref in worker.text.model.graph.weights()
        if ref.role in ("embed", "logits")
    }
    read = float(worker.facts.weight_bytes - ends["embed"].nbytes)
    largest = ends["logits"].data  # type: ignore[union-attr]
    results = []
    for what, entries in (
        ("decode, context 128", [(127, 1)]),
        ("decode, context 128", [(127, 1)] * 8),
        ("decode, context 128", [(127, 1)] * 16),
        ("decode, context 128", [(127, 1)] * 32),
        ("prefill", [(0, 512)]),
        ("prefill", [(0, 2048)]),
    ):
        with torch.inference_mode():
            plan = _plan(worker, entries)
            batch = make_batch(plan, None, worker._rows, worker._tables, worker._pool)
            tokens = sum(count for _, count in entries)
            operations = 2.0 * (tokens * parameters + len(entries) * head)
            run = partial(worker.text.program.step, batch, LOGITS)
            told = f"step: {what}", tokens, read, operations
            results.append(measure(team, rounds if tokens < 64 else 3, largest, run, *told))
            worker._rows.release(list(range(len(entries))))
    return results


def _plan(worker: Worker, entries: list[tuple[int, int]]) -> StepPlan:
    each = 600 // len(entries) if len(entries) > 1 else 150
    for row, (start, count) in enumerate(entries):
        tokens = torch.randint(100, 20_000, (start + count,)).tolist()
        spec = RequestSpec(SamplingParams(temperature=0), 0)
        worker._rows.admit(Admission(row, row, tokens, len(tokens), 0, spec))
        need = -(-(start + count) // 16)
        first = 1 + row * min(each, need)
        worker._tables.write([BlockWrite(row, 0, 0, list(range(first, first + need)))])
    starts, counts = [list(column) for column in zip(*entries, strict=True)]
    return StepPlan(1, list(range(len(entries))), starts, counts, [True] * len(entries))


def beside(other: str, threads: int, rounds: int, turns: int) -> dict[str, list[dict[str, float]]]:
    """Best milliseconds of each whole step, `ours` and `theirs`, a dictionary for each turn."""
    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for turn in range(turns):
        pair = [("theirs", other), ("ours", sys.executable)]
        for name, python in pair if turn % 2 == 0 else pair[::-1]:
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                command = [python, __file__, "--steps", "--json", file.name]
                command += ["--threads", str(threads), "--rounds", str(rounds)]
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                rows = json.loads(Path(file.name).read_text())["results"]
            best = {f"{r['what']}, {r['rows']} rows": 1e3 * r["best_seconds"] for r in rows}
            found[name].append({what: round(value, 2) for what, value in best.items()})
        for what, ours in found["ours"][-1].items():
            theirs = found["theirs"][-1][what]
            print(f"{turn}  {what:36} {ours:9.2f} ms, theirs {theirs:9.2f}: x{ours / theirs:.3f}")
    for what in found["ours"][0]:
        ratios = [a[what] / b[what] for a, b in zip(found["ours"], found["theirs"], strict=True)]
        print(f"median {what:36} x{statistics.median(ratios):.3f} of their time")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-model", action="store_true", help="kernels only")
    parser.add_argument("--steps", action="store_true", help="whole steps only")
    parser.add_argument("--beside", metavar="PYTHON", help="of another checkout's environment")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.beside:
        found = beside(arguments.beside, arguments.threads, arguments.rounds, arguments.turns)
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    team = Team(arguments.threads)
    results = [] if arguments.steps else products(team, arguments.rounds)
    if not arguments.no_model:
        results += whole_steps(arguments.threads, arguments.rounds)
    print(
        f"level {team.level}, {team.threads} threads, {platform.processor() or platform.machine()}"
    )
    print(f"{'what':28} rows   median ms    best ms   GB/s  GOP/s  ceilings        share, bound")
    for r in results:
        print(
            f"{r.what:28} {r.rows:4} {1e3 * r.seconds:11.3f} {1e3 * r.best_seconds:10.3f} "
            f"{r.bytes / r.seconds / 1e9:6.1f} {r.operations / r.seconds / 1e9:6.0f}  "
            f"{r.bandwidth / 1e9:4.0f} GB/s {r.int8_rate / 1e9:4.0f}  "
            f"{100 * r.share:5.0f} % {r.bound}"
        )
    if arguments.json:
        rows = [{**asdict(r), "share": r.share, "bound": r.bound} for r in results]
        about = {"level": team.level, "threads": team.threads, "machine": platform.platform()}
        arguments.json.write_text(json.dumps({**about, "results": rows}, indent=1))


if __name__ == "__main__":
    main()

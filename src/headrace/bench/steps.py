"""Timing of steps on a real worker: `python -m headrace.bench.steps MODEL [KERNELS]`.

Prints one step record per line (`roofline.fit.StepRecord`), with "held_out" for the shapes that a
fit must not see. The KV contents are arbitrary; a step's time does not depend on them. Each round
covers all shapes, so that a slow minute of a shared machine affects them alike. The best of the
rounds is printed, since other load can only slow a step. Short steps have more rounds than long
ones.
"""

from __future__ import annotations

import json
import sys

from ..base.groups import graph_groups
from ..base.hardware import cpu
from ..base.sampling import SamplingParams
from ..base.spec import RequestSpec
from ..base.step import Admission, BlockWrite, PoolShape, StepPlan
from ..engine.loop.prediction import serving_types
from ..loader import open_model
from ..models.registry import describe
from ..worker import Worker, WorkerOptions

ROUNDS = 3
SHORT_ROUNDS = 24
SHORT_SECONDS = 0.15
"""Longest step, in seconds, that gets `SHORT_ROUNDS`."""
CONTEXT = 2560
ROWS = 32
STEP_TOKENS = 512
BLOCK = 16

Shape = tuple[tuple[int, ...], tuple[int, ...]]


def decode(batch: int, context: int) -> Shape:
    return (context,) * batch, (1,) * batch


def shapes() -> list[tuple[Shape, bool]]:
    """Return shapes: (starts and counts, held out?)."""
    fit: list[Shape] = [
        decode(batch, context) for batch in (1, 2, 4, 5, 8, 16, 32) for context in (64, 600, 2000)
    ]
    fit += [((start,), (count,)) for count in (8, 32, 128, 512) for start in (0, 1024)]
    fit += [((0,) * 4, (64,) * 4), ((0,) * 8, (16,) * 8)]
    fit += [
        ((context,) * batch + (0,), (1,) * batch + (count,))
        for batch, context, count in ((4, 300, 64), (16, 900, 256), (8, 100, 480))
    ]
    held: list[Shape] = [
        decode(3, 300),
        decode(6, 1200),
        decode(12, 150),
        decode(24, 900),
        decode(1, 1400),
        ((0,), (48,)),
        ((0,), (200,)),
        ((512,), (384,)),
        ((0,) * 3, (100,) * 3),
        ((500,) * 6 + (0,), (1,) * 6 + (160,)),
        ((1500,) * 12 + (256,), (1,) * 12 + (320,)),
        ((40, 700, 1900, 250), (1, 1, 1, 1)),
    ]
    return [(shape, False) for shape in fit] + [(shape, True) for shape in held]


def measure(model: str, kernels: str) -> None:
    files = open_model(model)
    arch = files.arch
    context = min(CONTEXT, arch.max_context)
    dtype, kv_dtype = serving_types(files)
    worker = Worker(
        files,
        WorkerOptions(
            kernels=kernels,
            dtype=dtype,
            kv_dtype=kv_dtype,
            threads=cpu().physical_cores,
            rows=ROWS,
            step_tokens=STEP_TOKENS,
            max_context=context,
        ),
    )
    per_row = -(-context // BLOCK)
    pool = PoolShape(BLOCK, graph_groups(describe(arch), kv_dtype, 1 + ROWS * per_row))
    worker.allocate(pool)
    worker.warm_up()
    spec = RequestSpec(SamplingParams(temperature=0.0, max_tokens=None), seed=0)
    plan = StepPlan(
        0,
        list(range(ROWS)),
        [0] * ROWS,
        [1] * ROWS,
        [False] * ROWS,
        admitted=[Admission(row, row, [5] * 16, 16, 0, spec) for row in range(ROWS)],
        blocks=[
            BlockWrite(row, group, 0, list(range(1 + row * per_row, 1 + (row + 1) * per_row)))
            for row in range(ROWS)
            for group in range(len(pool.groups))
        ],
    )
    assert worker.execute(plan).error is None
    all_shapes = shapes()
    times: list[list[float]] = [[] for _ in all_shapes]
    number = 1
    for round_ in range(SHORT_ROUNDS):
        for index, ((starts, counts), _) in enumerate(all_shapes):
            if round_ >= ROUNDS and min(times[index]) > SHORT_SECONDS:
                continue
            plan = StepPlan(
                number, list(range(len(starts))), list(starts), list(counts), [True] * len(starts)
            )
            number += 1
            result = worker.execute(plan)
            if result.error is not None:
                raise SystemExit(f"a step failed: {result.error}")
            times[index].append(result.seconds)
    for ((starts, counts), held), found in zip(all_shapes, times, strict=True):
        record = {
            "starts": list(starts),
            "counts": list(counts),
            "samples": len(starts),
            "seconds": min(found),
            "held_out": held,
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    measure(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "auto")

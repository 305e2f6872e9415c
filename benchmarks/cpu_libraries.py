"""Two builds of the CPU library on the same steps of a model, in turns in one process.

Run: `python benchmarks/cpu_libraries.py OLD.so NEW.so [--model GGUF] [--rounds 5] CASE…`; gives ms
by operator, of the default model unless another is named.
A case is ROWSxCONTEXT (decoding), ROWSxCONTEXT/SHARED (so many first tokens in common blocks), or
COUNT@START (a part of a prompt). Both must have the same C ABI: `hr_version`, records.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np

from headrace.base.config import DEFAULT_MODEL
from headrace.base.groups import graph_groups
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.kernels.cpu import library
from headrace.kernels.cpu.library import Team
from headrace.kernels.cpu.timing import timed
from headrace.kernels.program import LOGITS
from headrace.loader.open import open_model
from headrace.models.registry import describe
from headrace.worker import Worker, WorkerOptions

BLOCK, BLOCKS, THREADS = 16, 2400, 2


def team_of(file: Path) -> Team:
    """Threads that run the records of this build."""
    library.FILE = library.INSTALLED = file
    library.SOURCES = file.with_suffix(".csrc")  # whichever it was built from
    library.load.cache_clear()
    return Team(THREADS)


def plan_of(worker: Worker, case: str, groups: int) -> StepPlan:
    """Admit the rows of a case; their own blocks lie in a random order."""
    found = re.fullmatch(r"(\d+)([x@])(\d+)(?:/(\d+))?", case)
    if found is None:
        raise SystemExit(f"{case!r} is no case: ROWSxCONTEXT, ROWSxCONTEXT/SHARED or COUNT@START")
    first, second = int(found[1]), int(found[3])
    rows, start, count = (1, second, first) if found[2] == "@" else (first, second - 1, 1)
    shared = int(found[4] or 0) // BLOCK
    free = iter(random.sample(range(1 + shared, BLOCKS), BLOCKS - 1 - shared))
    for row in range(rows):
        tokens = [random.randrange(100, 300) for _ in range(start + count)]
        spec = RequestSpec(SamplingParams(temperature=0), 0)
        worker._rows.admit(Admission(row, row, tokens, len(tokens), 0, spec))
        own = [next(free) for _ in range(-(-len(tokens) // BLOCK) - shared)]
        for group in range(groups):
            worker._tables.write([BlockWrite(row, group, 0, [*range(1, 1 + shared), *own])])
    return StepPlan(1, list(range(rows)), [start] * rows, [count] * rows, [True] * rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("cases", nargs="+", metavar="CASE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=4096, help="the longest")
    arguments = parser.parse_args()
    teams = {each: team_of(getattr(arguments, each)) for each in ("old", "new")}
    files = open_model(arguments.model)
    worker = Worker(
        files,
        WorkerOptions(
            kernels="cpu",
            threads=THREADS,
            rows=32,
            step_tokens=2048,
            max_context=arguments.context,
        ),
    )
    groups = graph_groups(describe(files.arch), worker._resolved.kv_dtype, BLOCKS)
    worker.allocate(PoolShape(BLOCK, groups))
    program = worker.text.program
    for case in arguments.cases:
        plan = plan_of(worker, case, len(groups))
        batch = worker._batch(plan)
        times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        answers = {}
        for number in range(1 + arguments.rounds):
            for name in random.sample(list(teams), len(teams)):
                program._operators.team = teams[name]  # type: ignore[union-attr]
                with timed() as records:
                    answers[name] = np.array(program.step(batch, LOGITS).logits)
                sums: dict[str, float] = defaultdict(float)
                for record in records:
                    sums[record.name] += record.seconds
                for operator, seconds in sums.items():
                    if number:  # The first round only warms up.
                        times[operator][name].append(1e3 * seconds)
        worker._rows.release(plan.rows)
        difference = float(np.abs(answers["old"] - answers["new"]).max())
        print(f"{case}: largest difference of a logit {difference:.3g}")
        medians = {op: [statistics.median(of[name]) for name in teams] for op, of in times.items()}
        totals = [sum(column) for column in zip(*medians.values(), strict=True)]
        for operator, (old, new) in {**medians, "sum": totals}.items():
            print(f"  {operator:<12}{old:9.2f}{new:9.2f}  x{new / old:.3f}", flush=True)


if __name__ == "__main__":
    main()

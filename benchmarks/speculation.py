"""What a step costs that verifies drafts: one sequence, one to eight rows, in turns.

Run: `python benchmarks/speculation.py [--rows 1 2 3 4 5 6 7 8] [--rounds 40] [--context 512]
[--threads N] [--json FILE]`.

Each round takes one step of each length, in an order of its own, on the same sequence; every step's
drafts are wrong, so that the text grows by one token and all lengths meet the same context. Given
are the median and the least of whole steps, the median ratio to a decode step of the same round,
and `host`: what of a step is not the library's call.

Beside it is what this machine's roofline predicts, and how far that is off: of the time, and of the
ratio to one row, which is all that a price of drafts needs.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from headrace.base.config import DEFAULT_MODEL
from headrace.base.groups import graph_groups
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, PoolShape, StepPlan
from headrace.engine.loop.prediction import serving_types, step_predictor
from headrace.kernels.cpu.library import Team
from headrace.loader.open import open_model
from headrace.models.registry import describe
from headrace.speculate import Proposal, Speculation
from headrace.worker import Worker, WorkerOptions

BLOCK = 16


class Wrong:
    """Proposes a token that is never drawn: every draft is verified and refused."""

    name = "wrong"
    token = 0

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, most: int) -> Proposal:
        return Proposal([self.token] * most, 1, self.name)


class Inside:
    """The time in the library's calls."""

    def __init__(self) -> None:
        self.seconds, call = 0.0, Team.run_at

        def timed(team: Team, first: int, count: int, step: int) -> None:
            begin = time.perf_counter()
            call(team, first, count, step)
            self.seconds += time.perf_counter() - begin

        Team.run_at = timed  # type: ignore[method-assign]


def measure(
    rows: list[int], rounds: int, context: int, threads: int | None
) -> dict[int, dict[str, float]]:
    inside = Inside()
    total = context + rounds * len(rows) + 64
    options = WorkerOptions(
        threads=threads, rows=1, step_tokens=512, max_context=total, drafts=max(rows) - 1
    )
    worker = Worker(open_model(DEFAULT_MODEL), options, speculation=Speculation([Wrong]))
    blocks = -(-total // BLOCK)
    worker.allocate(PoolShape(BLOCK, graph_groups(describe(worker.arch), "bfloat16", blocks + 1)))
    rng = random.Random(1)
    prompt = [rng.randrange(1000, 20000) for _ in range(context)]
    spec = RequestSpec(SamplingParams(temperature=0.0, max_tokens=None), 0)
    plan = StepPlan(0, [0], [0], [context], [True])
    plan.admitted.append(Admission(0, 0, prompt, context, 0, spec))
    plan.blocks.append(BlockWrite(0, 0, 0, list(range(1, blocks + 1))))
    result, known = worker.execute(plan), context
    seconds: defaultdict[int, list[float]] = defaultdict(list)
    hosts: defaultdict[int, list[float]] = defaultdict(list)
    for number in range(1, rounds + 3):
        for count in rng.sample(rows, len(rows)):
            assert result.error is None, result.error
            known += len(result.tokens[0])
            inside.seconds = 0.0
            begin = time.perf_counter()
            result = worker.execute(StepPlan(number, [0], [known - 1], [count], [True]))
            took = time.perf_counter() - begin
            assert len(result.tokens[0]) == 1, "a wrong draft was accepted"
            if number > 2:
                seconds[count].append(1e3 * took)
                hosts[count].append(1e3 * (took - inside.seconds))
    base = seconds[rows[0]]
    return {
        count: {
            "median_ms": statistics.median(found),
            "least_ms": min(found),
            "ratio": statistics.median(a / b for a, b in zip(found, base, strict=True)),
            "host_ms": statistics.median(hosts[count]),
        }
        for count, found in sorted(seconds.items())
    }


def predict(rows: list[int], context: int) -> dict[int, float]:
    """Rows → milliseconds by the roofline; empty where this machine is not known."""
    files = open_model(DEFAULT_MODEL)
    dtype, kv_dtype = serving_types(files)
    expect = step_predictor(files, device="cpu", dtype=dtype, kv_dtype=kv_dtype)
    if expect is None:
        return {}
    plans = (StepPlan(0, [0], [context], [one], [True], drafts=one - 1) for one in rows)
    return {one: 1e3 * expect(plan).seconds for one, plan in zip(rows, plans, strict=True)}


def compare(found: dict[int, dict[str, float]], context: int) -> None:
    """Print predictions and add them to what was found."""
    told = predict(list(found), context)
    if not told:
        return
    first = min(found)
    times, ratios = [], []
    print("rows  predicted ms  ratio  time off  ratio off")
    for count, one in found.items():
        ratio = told[count] / told[first]
        one["predicted_ms"], one["predicted_ratio"] = told[count], ratio
        times.append(abs(told[count] / one["median_ms"] - 1))
        ratios.append(abs(ratio / one["ratio"] - 1))
        numbers = told[count], ratio, times[-1], ratios[-1]
        print("{:4d}  {:12.2f}  {:5.2f}  {:8.1%}  {:9.1%}".format(count, *numbers))
    print(
        f"median off: {statistics.median(times):.1%} of the time, "
        f"{statistics.median(ratios[1:]):.1%} of the ratio"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.rows, args.rounds, args.context, args.threads)
    print("rows  median ms  least ms  ratio  host ms")
    for count, one in found.items():
        numbers = one["median_ms"], one["least_ms"], one["ratio"], one["host_ms"]
        print("{:4d}  {:9.2f}  {:8.2f}  {:5.2f}  {:7.3f}".format(count, *numbers))
    compare(found, args.context)
    if args.json:
        shown = {**vars(args), "json": None}
        args.json.write_text(json.dumps({"options": shown, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What speculation gains at once, on virtual time: recorded answers, real scheduler and drafters.

    python benchmarks/speculation_replay.py record answers.jsonl   # minutes: a real model answers
    python benchmarks/speculation_replay.py replay answers.jsonl [--json FILE]   # two minutes

Since the target draws the same tokens whatever was drafted, recorded answers and what steps take
are enough to say how long a batch takes with any choice of drafts; other work on the machine
changes nothing. A step takes what `docs/kernels.md` says of whole steps of the default model in a
fast minute (55 to 60 GB/s), or what it took in a slow one (33 GB/s); a token of a prompt has no
head. The host's own time is not in it.

The price that drafts are chosen by begins with what a roofline says that knows the machine
(`true`), with nothing (`unknown`), or with a roofline of a machine that was measured beside
others' work, on which rows are as good as free (`loaded`), and then learns from the steps. Each
cell: seconds until the last answer has ended, and mean seconds until an answer has, without drafts
over with. At once: so many answers, and no more (`batch`); or as many as there are, so many at a
time (`stream`).

Recorded answers end after the same number of tokens, so that without drafts a wave ends in one step
and with them one by one, which leaves small steps at the end: a stream of two waves loses more by
that than drafts cost. With `--varied N` each answer is cut to a length from a quarter to all of
`--tokens`, in N orders; cells are geometric means over them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from speculation_speed import prompts

from headrace import LLM, SamplingParams
from headrace.base.config import DEFAULT_MODEL
from headrace.base.request import Request
from headrace.base.spec import RequestSpec
from headrace.base.step import ArrayShape, GroupShape, PoolShape, StepPlan, StepResult
from headrace.bench.natural import CLASSES
from headrace.kv import KvManager
from headrace.sched import Limits, Scheduler, StepPrices
from headrace.sched.price import least
from headrace.speculate import DEFAULT, NOTHING, Drafts, Proposal, Speculation

Price = Callable[[int], float]
Recorded = dict[str, Any]
MINUTES = {
    "fast": ((1, 7.3), (2, 7.4), (4, 9.9), (8, 14.7), (16, 27.7), (32, 50.8), (544, 793.0)),
    "slow": ((1, 13.4), (4, 14.6), (8, 19.5), (16, 35.0), (32, 66.0), (544, 1040.0)),
    "intel": ((1, 13.4), (2, 14.1), (4, 17.4), (8, 20.2), (16, 35.5), (32, 60.8), (544, 951.0)),
}
"""(rows, milliseconds) of steps, between which a line runs; of an Intel of two cores those of
contexts of 64 and 600 tokens in `results/speculation_intel_steps.jsonl`."""
HEAD = 0.27
"""Share of the head in what a row adds."""
MOST = 7
POOL = PoolShape(16, (GroupShape("all", (0,), None, 16384, (ArrayShape("k", (1,), "float32"),)),))


def step_seconds(minute: str, rows: float) -> float:
    points = MINUTES[minute]
    for (low, fast), (high, slow) in pairwise(points):
        if rows <= high:
            return (fast + (slow - fast) * (rows - low) / (high - low)) / 1e3
    raise ValueError(f"{rows} rows")


def loaded(rows: int) -> float:
    """What a roofline said on a machine whose memory others used while it was measured."""
    free = 57 + 0.3 * rows
    return max(free, 57.3 * least(rows))


def record(file: Path, count: int, tokens: int) -> None:
    """Write first turns of every class with their answers, a line each."""
    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    with LLM(DEFAULT_MODEL, max_sequences=16, max_context=4096) as llm, file.open("w") as kept:
        for name in CLASSES:
            asked = prompts(name, count, 77, tokens)
            for one in llm.chat(asked, greedy, use_tqdm=False):
                answer = one.outputs[0].token_ids
                line = {"class": name, "prompt": one.prompt_token_ids, "answer": answer}
                kept.write(json.dumps(line) + "\n")


@dataclass
class Row:
    """A sequence whose answer is known."""

    answer: list[int]
    drafts: Drafts
    said: int = 0
    ready: Proposal = NOTHING


class Replay:
    """A worker's part: it says what was recorded, and drafts as the real one does."""

    def __init__(self, answers: Sequence[Recorded], drafts: int) -> None:
        self._answers, self._drafts = answers, drafts
        self._speculation = Speculation(names=DEFAULT)
        self._rows: dict[int, Row] = {}

    def step(self, plan: StepPlan) -> StepResult:
        for row in plan.released:
            self._rows.pop(row).drafts.end()
        for admission in plan.admitted:
            answer = self._answers[admission.spec.seed]["answer"]
            known = len(admission.tokens)
            drafts = self._speculation.begin("", prompt=known)
            drafts.extend(admission.tokens)
            assert known == admission.prompt_length, "nobody gives way here"
            self._rows[admission.row] = Row(answer, drafts)
        tokens: list[list[int]] = []
        proposed: list[bytes] = []
        for row, count, samples in zip(plan.rows, plan.counts, plan.samples, strict=True):
            tokens.append(self._said(self._rows[row], count) if samples else [])
            ready = self._rows[row].ready
            alive = self._rows[row].drafts.survival(ready) if samples else ()
            proposed.append(bytes(round(255 * one) for one in alive))
        return StepResult(plan.number, tokens, proposed=proposed if self._drafts else None)

    def _said(self, row: Row, count: int) -> list[int]:
        tried = replace(row.ready, tokens=row.ready.tokens[: count - 1 if row.said else 0])
        coming, right = row.answer[row.said :], 0
        while right < len(tried) and [tried.tokens[right]] == coming[right : right + 1]:
            right += 1
        row.drafts.settle(tried, right)
        new = coming[: right + 1]
        row.said += len(new)
        row.drafts.extend(new)
        row.ready = row.drafts.propose(MOST) if self._drafts else NOTHING
        return new


def replay(
    answers: Sequence[Recorded], rows: int, minute: str, prior: Price | None
) -> tuple[float, float]:
    """(seconds until the last has ended, mean seconds until one has). No prior: no drafts."""
    drafts = MOST if prior else 0
    now = 0.0
    scheduler = Scheduler(
        Limits(rows, 512, 8192, len(answers), drafts=drafts),
        KvManager(POOL),
        clock=lambda: now,
        prices=StepPrices(prior) if prior else None,
    )
    for place, one in enumerate(answers):
        sampling = SamplingParams(temperature=0, max_tokens=len(one["answer"]))
        spec = RequestSpec(sampling, seed=place)
        scheduler.add(Request(id=str(place), prompt=one["prompt"], spec=spec, arrival=0.0))
    worker, ends = Replay(answers, drafts), []
    while plan := scheduler.schedule():
        result = worker.step(plan)
        prompts = sum(
            count
            for count, new in zip(plan.counts, result.tokens, strict=True)
            if count > 1 + MOST or not new
        )
        row = (step_seconds(minute, 33) - step_seconds(minute, 32)) * HEAD
        result.seconds = step_seconds(minute, plan.tokens) - prompts * row
        now += result.seconds
        ends += [now for delta in scheduler.update(plan, result) if delta.finish]
    assert len(ends) == len(answers)
    return now, statistics.mean(ends)


def measure(
    answers: list[Recorded], at_once: Sequence[int], minutes: Sequence[str], varied: int
) -> list[dict[str, Any]]:
    classes = {name: [one for one in answers if one["class"] == name] for name in CLASSES}
    classes["mixed"] = [one for turn in zip(*classes.values(), strict=True) for one in turn]
    found = []
    for minute, (name, all), rows, kind in product(
        minutes, classes.items(), at_once, ("batch", "stream")
    ):
        some = all[:rows] if kind == "batch" else all
        if len(some) < rows or (kind == "stream" and len(some) == rows):
            continue
        priors: dict[str, Price] = {
            "true": lambda rows, minute=minute: step_seconds(minute, rows),  # type: ignore[misc]
            "unknown": least,
            "loaded": loaded,
        }
        cell = {"minute": minute, "class": name, "at_once": rows, "kind": kind}
        draws = [cut(some, seed) for seed in range(varied)] or [some]
        without = [replay(draw, rows, minute, None) for draw in draws]
        for title, prior in priors.items():
            drafting = [replay(draw, rows, minute, prior) for draw in draws]
            cell[title] = [
                round(geometric(before[at] / after[at] for before, after in pairs), 3)
                for at in range(2)
                for pairs in [list(zip(without, drafting, strict=True))]
            ]
        print(*cell.values(), flush=True)
        found.append(cell)
    return found


def cut(answers: Sequence[Recorded], seed: int) -> list[Recorded]:
    """The same answers in another order, each ending somewhere behind its first quarter."""
    chance = random.Random(seed)
    lengths = [chance.randint(len(one["answer"]) // 4, len(one["answer"])) for one in answers]
    some = [
        {**one, "answer": one["answer"][: max(1, length)]}
        for one, length in zip(answers, lengths, strict=True)
    ]
    return chance.sample(some, len(some))


def geometric(numbers: Iterable[float]) -> float:
    return math.exp(statistics.mean(map(math.log, numbers)))


def summary(cells: list[dict[str, Any]]) -> None:
    print("geometric mean (least) of the classes: until the last has ended; until one has")
    for minute, rows, kind, prior in sorted(
        {
            (one["minute"], one["at_once"], one["kind"], prior)
            for one in cells
            for prior in ("true", "unknown", "loaded")
        }
    ):
        key = {"minute": minute, "at_once": rows, "kind": kind}
        some = [one[prior] for one in cells if one.items() >= key.items()]
        texts = []
        for place in range(2):
            each = [one[place] for one in some]
            texts.append(f"{geometric(each):.3f} ({min(each):.3f})")
        print(f"{minute} x{rows} {kind} {prior}: {'; '.join(texts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("record", "replay"))
    parser.add_argument("answers", type=Path)
    parser.add_argument("--count", type=int, default=12, help="answers of a class")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--minutes", nargs="+", default=[*MINUTES], choices=MINUTES)
    parser.add_argument("--varied", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.what == "record":
        record(args.answers, args.count, args.tokens)
        return
    answers = [json.loads(line) for line in args.answers.read_text().splitlines()]
    for one in answers:
        one["answer"] = one["answer"][: args.tokens]
    cells = measure(answers, args.at_once, args.minutes, args.varied)
    summary(cells)
    if args.json:
        args.json.write_text(
            json.dumps({"tokens": args.tokens, "varied": args.varied, "cells": cells}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()

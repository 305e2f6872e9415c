"""Whether speculation is ever slower: answers of the default model with drafts and without.

Run: `python benchmarks/speculation_speed.py [--rounds 5] [--at-once 1 8 16 32] [--tokens 128]
[--classes NAME …] [--threads N] [--model NAME] [--draft-model NAME] [--speculate auto]
[--waves 3] [--varied] [--json FILE [--go-on] [--seconds S]]`, or `make bench-speculation`.

Two engines in one process, one with `--speculate auto` and perhaps a draft model, one without,
answer the same prompts in turns, whoever begins changing with the round. Each round has prompts of
its own (`bench/natural.py` with another seed), so that no engine has seen them and nothing is
learnt from an earlier time that they were asked. At once: so many first turns of one class, and
`mixed`, of all of them. Answers must be equal, token by token. Given are the ratio of seconds,
without over with, of each round: its median and the least, the tokens per second of both, and how
much was reached of the speed that the engine's prices allow for the drafts that were accepted.

Answers of one length end together without drafts and one by one with them, which leaves small
steps at the end of a round. With `--varied` each ends somewhere behind its first quarter.

With `--go-on` the rounds that FILE has count, and only those that it lacks run, none that begins
later than `--seconds`. So a machine that is quiet for a minute at a time gives all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from headrace import LLM, SamplingParams
from headrace.base.config import DEFAULT_MODEL
from headrace.bench.lengths import parse_lengths
from headrace.bench.material import Material
from headrace.bench.natural import CLASSES
from headrace.bench.workload import Wish, make_workload

Messages = list[dict[str, Any]]
MIXED = "mixed"


class Round(NamedTuple):
    """The same prompts answered by both engines."""

    without_s: float
    with_s: float
    tokens: int
    allowed_s: float
    """Seconds without, less what the drafts that were accepted should have saved and those that
    were verified should have cost, by the prices of which they were chosen."""

    @property
    def share(self) -> float:
        """The speed that was reached, of the one that prices allow for what was accepted; of one
        answer at a time, since others share the steps that one saves."""
        return self.allowed_s / self.with_s


Cells = dict[tuple[str, int, int], list[Round]]
"""(class, at once, most tokens of an answer) → rounds."""


def prompts(name: str, count: int, seed: int, tokens: int) -> list[Messages]:
    """`count` first turns of a class, or of all of them by turns."""
    if name == MIXED:
        each = [prompts(one, -(-count // len(CLASSES)), seed, tokens) for one in CLASSES]
        by_turns = chain.from_iterable(zip_longest(*each))
        return [one for one in by_turns if one is not None][:count]
    lengths = parse_lengths(str(tokens))
    wish = Wish(count, seed, lengths, lengths, Material(), False)
    return [
        [
            *([{"role": "system", "content": session.system}] if session.system else []),
            {"role": "user", "content": session.turns[0].text},
        ]
        for session in make_workload(name, wish)
    ]


def timed(
    llm: LLM, asked: list[Messages], lengths: Sequence[int]
) -> tuple[float, list[list[int]], float]:
    """Seconds, the ids of each greedy answer, and how many seconds drafts saved by their prices."""
    wishes = [SamplingParams(temperature=0, max_tokens=length) for length in lengths]
    begin = time.perf_counter()
    answers = llm.chat(asked, wishes, use_tqdm=False)
    seconds = time.perf_counter() - begin
    drafted = [answer.drafted for answer in answers if answer.drafted is not None]
    saved = sum(one.saved - one.spent for one in drafted)
    return seconds, [answer.outputs[0].token_ids for answer in answers], saved


def measure(
    classes: Sequence[str],
    at_once: Sequence[int],
    rounds: int,
    tokens: int,
    waves: int,
    varied: bool,
    options: dict[str, Any],
    drafts: dict[str, Any],
    cells: Cells,
    until: float,
    keep: Callable[[], None],
) -> None:
    """Add to each cell the rounds that it lacks, none that begins later than `until`; `keep` what
    there is after each."""
    for count in at_once:
        lacking = [
            (number, name)
            for number, name in product(range(rounds), classes)
            if number >= len(cells.get((name, count, tokens), ()))
        ]
        if not lacking:
            continue
        limits = {**options, "max_sequences": count}
        with LLM(speculate="off", **limits) as plain, LLM(**drafts, **limits) as drafting:
            # Whoever comes first pays for memory that nobody touched and templates that nobody
            # compiled.
            each = -(-count // len(classes))
            for llm, name in product((plain, drafting), classes):
                timed(llm, prompts(name, each, 10**6, tokens), [8] * each)
            for number, name in lacking:
                if time.perf_counter() > until:
                    return
                asked = prompts(name, waves * count, 1000 * number + count, tokens)
                chance, least = random.Random(number), tokens // 4 if varied else tokens
                lengths = [chance.randint(least, tokens) for _ in asked]
                order = (plain, drafting) if number % 2 else (drafting, plain)
                found = {id(llm): timed(llm, asked, lengths) for llm in order}
                (without, wanted, _), (drafted, said, saved) = (
                    found[id(plain)],
                    found[id(drafting)],
                )
                assert said == wanted, f"{name}: another answer"
                one = Round(without, drafted, sum(map(len, said)), without - saved)
                cells.setdefault((name, count, tokens), []).append(one)
                keep()
                print(
                    f"round {number} {name} x{count}: {without:.2f} s, {drafted:.2f} s, "
                    f"x{without / drafted:.3f}, {allowed(count, [one])} of what prices allow",
                    flush=True,
                )


def allowed(count: int, found: Sequence[Round]) -> str:
    return f"{statistics.median(one.share for one in found):.0%}" if count == 1 else "–"


def summary(name: str, count: int, tokens: int, found: list[Round]) -> dict[str, Any]:
    ratios = [one.without_s / one.with_s for one in found]
    return {
        "class": name,
        "at_once": count,
        "most_tokens": tokens,
        "ratio_median": statistics.median(ratios),
        "ratio_least": min(ratios),
        "of_allowed": allowed(count, found),
        "without_tokens_per_second": statistics.median(one.tokens / one.without_s for one in found),
        "with_tokens_per_second": statistics.median(one.tokens / one.with_s for one in found),
        "rounds": [one._asdict() for one in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--classes", nargs="+", default=[*CLASSES, MIXED])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--draft-model")
    parser.add_argument("--speculate", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--waves", type=int, default=3, help="prompts of a round for each that runs"
    )
    parser.add_argument("--varied", action="store_true")
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args()
    until = time.perf_counter() + args.seconds
    cells: Cells = {}
    if args.go_on and args.json.exists():
        for cell in json.loads(args.json.read_text())["cells"]:
            key = cell["class"], cell["at_once"], cell["most_tokens"]
            cells[key] = [Round(**one) for one in cell["rounds"]]
    options: dict[str, Any] = {"model": args.model, "max_context": 4096}
    drafts = {"speculate": args.speculate, "draft_model": args.draft_model}
    if args.threads:
        options["threads"] = args.threads
    of_all = ("waves", "varied", "threads", "model", "draft_model", "speculate")
    shown = {key: vars(args)[key] for key in of_all}

    def found() -> list[dict[str, Any]]:
        return [summary(*cell, rounds) for cell, rounds in cells.items()]

    def keep() -> None:
        if args.json:
            text = json.dumps({"options": shown, "cells": found()}, indent=1)
            args.json.write_text(text + "\n")

    wanted = args.classes, args.at_once, args.rounds, args.tokens, args.waves, args.varied
    measure(*wanted, options, drafts, cells, until, keep)
    print("class         at once  tok/s without  tok/s with  median ratio  least  of allowed")
    for one in found():
        print(
            "{class:12s}  {at_once:7d}  {without_tokens_per_second:13.1f}  "
            "{with_tokens_per_second:10.1f}  {ratio_median:12.2f}  {ratio_least:5.2f}  "
            "{of_allowed:>10s}".format(**one)
        )


if __name__ == "__main__":
    main()

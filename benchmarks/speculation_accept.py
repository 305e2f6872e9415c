"""How much of a model's answers drafters guess, without a step being run:

    python benchmarks/speculation_accept.py record answers.jsonl    # minutes: a real model answers
    python benchmarks/speculation_accept.py accept answers.jsonl    # seconds: drafters guess them
    python benchmarks/speculation_accept.py cost                    # host time of a look-up at 8k

`record` asks the default model the six classes of `bench/natural.py`, greedily. Since the target
draws the same tokens whatever was drafted, `accept` needs nothing but those answers: it walks along
each of them as a verifying step would, with every drafter and several lengths, and prints tokens
per step (1: nothing was accepted), how many of the drafted tokens were accepted, and microseconds
of host time per token. Classes stay apart: each is a tenant whose answers come one after the other.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.bench.lengths import parse_lengths
from headrace.bench.material import Material
from headrace.bench.natural import CLASSES, _sources
from headrace.bench.workload import Wish, make_workload
from headrace.speculate import DEFAULT, Drafter, Drafts, NGramDrafter, Speculation, SuffixDrafter
from headrace.speculate.suffix import Corpus

MODEL = "qwen2.5-coder-0.5b"
Opening = Callable[[str, dict[str, Any]], Drafts]
"""Makes the drafters for an answer of a class."""
SESSIONS = {"code-edit": 6, "tool-loop": 2, "conversation": 2}
"""Sessions of a class; others have four. Some have several turns: 32 answers in all."""


def record(model: str, tokens: int, seed: int, file: Path) -> None:
    """Write the answers of a model to every class, a line each as they come."""
    with LLM(model, speculate="off") as llm, file.open("w") as kept:
        greedy = SamplingParams(temperature=0, max_tokens=tokens)
        for name in CLASSES:
            lengths = parse_lengths(str(tokens))
            wish = Wish(SESSIONS.get(name, 4), seed, lengths, lengths, Material(), False)
            for session in make_workload(name, wish):
                history = [{"role": "system", "content": session.system}] * bool(session.system)
                for turn in session.turns:
                    history.append({"role": "user", "content": turn.text})
                    (answer,) = llm.chat(history, greedy)
                    output = answer.outputs[0]
                    history.append({"role": "assistant", "content": output.text})
                    code = turn.text.partition("```python\n")[2].partition("```")[0]
                    line = {
                        "class": name,
                        "prompt": answer.prompt_token_ids,
                        "answer": output.token_ids,
                        "prediction": llm.get_tokenizer().encode(code) if code else [],
                    }
                    kept.write(json.dumps(line) + "\n")
                    kept.flush()


@dataclass
class Tally:
    """What came of all steps of a class with one set of drafters."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0
    """Price of all steps, that of one row being 1."""
    host: float = 0.0
    """CPU seconds in drafters."""


def opening(speculation: Speculation) -> Opening:
    return lambda name, answer: speculation.begin(
        name, prompt=len(answer["prompt"]), expected=answer["prediction"]
    )


SETS: dict[str, Callable[[], Speculation]] = {
    "ngram": lambda: Speculation(names=["ngram"]),
    "suffix, own text": lambda: Speculation([SuffixDrafter]),
    "suffix, past answers too": lambda: Speculation(names=["suffix"]),
    "suffix and ngram": lambda: Speculation(names=["suffix", "ngram"]),
    "prediction": lambda: Speculation(names=["prediction"]),
    "prediction and suffix": lambda: Speculation(names=DEFAULT),
}
COST = (1, 1.02, 1.2, 1.36, 1.52, 1.68, 1.84, 2.0, *(2.0 + 0.22 * n for n in range(1, 25)))
"""A step of 1, 2, … rows against one of a single row: `docs/kernels.md`, between its rows by line;
what a row costs is to be measured for rows of one sequence."""
PRICED = 15
"""Longest draft where each step chooses what is worth its price."""


def priced(survival: Sequence[float]) -> int:
    """The length of most expected tokens per cost."""
    expected, best, length = 1.0, 1.0, 0
    for number, alive in enumerate(survival, 1):
        expected += alive
        if expected / COST[number] > best:
            best, length = expected / COST[number], number
    return length


def walk(drafts: Drafts, answer: dict[str, Any], most: int | None, tally: Tally) -> None:
    """Go along an answer as verifying steps do. `most`: drafts of a step; None: as priced."""
    tokens = answer["answer"]
    drafts.extend(answer["prompt"])
    drafts.extend(tokens[:1])  # The prompt's own step.
    at = 1
    while at < len(tokens):
        began = time.process_time()
        proposal = drafts.propose(PRICED if most is None else most)
        if most is None:
            length = priced(drafts.survival(proposal))
            proposal = replace(proposal, tokens=proposal.tokens[:length])
        right = 0
        while (
            right < len(proposal)
            and [proposal.tokens[right]] == tokens[at + right : at + right + 1]
        ):
            right += 1
        drafts.settle(proposal, right)
        new = tokens[at : at + right + 1]
        drafts.extend(new)
        tally.host += time.process_time() - began
        tally.steps += 1
        tally.tokens += len(new)
        tally.drafted += len(proposal)
        tally.accepted += right
        tally.cost += COST[len(proposal)]
        at += len(new)
    drafts.end()


def accept(answers: list[dict[str, Any]], lengths: Sequence[int | None]) -> list[dict[str, Any]]:
    """A line for each class, set of drafters and length."""
    found = []
    names = list(dict.fromkeys(one["class"] for one in answers))
    for title, make in SETS.items():
        for most in lengths:
            opened = opening(make())
            for name in names:
                tally = Tally()
                for answer in (one for one in answers if one["class"] == name):
                    if "prediction" not in title or answer["prediction"]:
                        walk(opened(name, answer), answer, most, tally)
                if tally.steps:
                    found.append(
                        {
                            "class": name,
                            "drafters": title,
                            "length": most,
                            "tokens_per_step": round(tally.tokens / tally.steps, 3),
                            "accepted_share": round(tally.accepted / max(tally.drafted, 1), 3),
                            "speed": round(tally.tokens / tally.cost, 3),
                            "host_us_per_token": round(1e6 * tally.host / tally.tokens, 1),
                        }
                    )
    return found


def cost(context: int = 8192, steps: int = 1000, rounds: int = 5) -> None:
    """CPU time of taking a token and proposing seven, behind `context` tokens: words of the
    library's sources, each a token. The least of some rounds: others use this machine."""
    known: dict[str, int] = {}
    words = [
        known.setdefault(word, len(known))
        for path in _sources()
        for word in re.findall(r"\w+|\s+|[^\w\s]", path.read_text(encoding="utf-8"))
    ]
    corpus = Corpus()
    corpus.add(words[:context])
    text, rest = words[context : 2 * context], words[2 * context : 2 * context + steps]
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": NGramDrafter,
        "suffix, own text": SuffixDrafter,
        f"suffix, {context} tokens of past answers": lambda: SuffixDrafter(corpus),
    }
    for title, make in makers.items():
        prompts, tokens = [], []
        for _ in range(rounds):
            drafter = make()
            began = time.process_time()
            drafter.extend(text)
            between = time.process_time()
            for token in rest:
                drafter.extend([token])
                drafter.propose(7)
            prompts.append((between - began) / context)
            tokens.append((time.process_time() - between) / steps)
        prompt, said = (1e6 * min(one) for one in (prompts, tokens))
        print(f"{title:40} {prompt:5.1f} µs a token of the prompt, {said:5.1f} µs a token said")


def show(found: list[dict[str, Any]]) -> None:
    """Tokens per step (and the share of drafts that were accepted) by class and length."""
    names = list(dict.fromkeys(one["class"] for one in found))
    lengths = list(dict.fromkeys(one["length"] for one in found))
    for title in SETS:
        rows = {(one["class"], one["length"]): one for one in found if one["drafters"] == title}
        print(f"\n{title}")
        print(f"{'class':14}" + "".join(f"{length or 'priced':>14}" for length in lengths))
        for name in names:
            cells = [rows.get((name, length)) for length in lengths]
            if any(cells):
                print(
                    f"{name:14}"
                    + "".join(
                        f"{one['tokens_per_step']:7.2f} {one['accepted_share']:4.0%}"
                        + ("  " if one["length"] else f" ×{one['speed']:.2f}")
                        for one in cells
                        if one
                    )
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="let a model answer")
    recording.add_argument("file", type=Path)
    recording.add_argument("--model", default=MODEL)
    recording.add_argument("--tokens", type=int, default=128)
    recording.add_argument("--seed", type=int, default=1)
    accepting = commands.add_parser("accept", help="let drafters guess the answers")
    accepting.add_argument("file", type=Path)
    accepting.add_argument("--json", type=Path, help="keep the figures")
    commands.add_parser("cost", help="host time of a look-up")
    options = parser.parse_args()
    if options.command == "cost":
        cost()
        return
    if options.command == "record":
        record(options.model, options.tokens, options.seed, options.file)
        return
    answers = [json.loads(line) for line in options.file.read_text().splitlines()]
    found = accept(answers, [1, 3, 7, 15, None])
    show(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

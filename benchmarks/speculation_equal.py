"""Whether drafts change an answer: 64 prompts of 256 tokens of the default model, each drafter.

Run: `python benchmarks/speculation_equal.py [--prompts 64] [--tokens 256] [--at-once 8]
[--json FILE]`.

Prompts of all classes (`bench/natural.py`) are answered without drafts, then with each choice of
`--speculate`, and with `auto` and a prediction (an answer without its last third); half of them
greedily, half at temperature 0.7, each with a seed of its own and log-probabilities. Ids,
log-probabilities and the reason of the end must be the same. Given is how many drafts were
verified and how many accepted; where that is none, nothing was proved, and the run fails.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from speculation_speed import MIXED, prompts

from headrace import LLM, SamplingParams
from headrace.base.config import DEFAULT_MODEL

WAYS = ("auto", "suffix", "ngram", "auto and a prediction")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    asked = prompts(MIXED, args.prompts, 5, args.tokens)
    wishes = [
        SamplingParams(temperature=0, max_tokens=args.tokens)
        if place % 2
        else SamplingParams(temperature=0.7, seed=place, max_tokens=args.tokens, logprobs=2)
        for place in range(args.prompts)
    ]
    options: dict[str, Any] = {"max_sequences": args.at_once, "max_context": 4096}
    begin = time.perf_counter()
    with LLM(DEFAULT_MODEL, speculate="off", **options) as llm:
        wanted = [answer.outputs for answer in llm.chat(asked, wishes)]
    tokens = sum(len(one.token_ids) for outputs in wanted for one in outputs)
    print(f"without: {tokens} tokens, {time.perf_counter() - begin:.0f} s", flush=True)
    found = []
    for way in args.ways:
        told = None
        if way == WAYS[-1]:
            told = [outputs[0].text[: len(outputs[0].text) * 2 // 3] for outputs in wanted]
        begin = time.perf_counter()
        with LLM(DEFAULT_MODEL, speculate=way.partition(" ")[0], **options) as llm:
            answers = llm.chat(asked, wishes, prediction=told)
            stats = llm.stats
        different = sum(
            answer.outputs != outputs for answer, outputs in zip(answers, wanted, strict=True)
        )
        verified, accepted = stats.draft_tokens, stats.accepted_tokens
        line = {"drafters": way, "verified": verified, "accepted": accepted}
        found.append({**line, "different": different})
        print(f"{found[-1]}, {time.perf_counter() - begin:.0f} s", flush=True)
        if args.json:
            shown = {key: value for key, value in vars(args).items() if key != "json"}
            text = json.dumps({"options": shown, "tokens": tokens, "found": found}, indent=1)
            args.json.write_text(text + "\n")
        assert not different, f"{way}: {different} answers differ"
        assert accepted, f"{way}: no draft was accepted, nothing was proved"


if __name__ == "__main__":
    main()

"""Two installations of Headrace on the same work, in turns: decoding, prefill, many at once, start.

Run: `python benchmarks/paired.py --against PYTHON [--rounds 5] [--only decode] [--json FILE]`.

PYTHON is that of another installation, of an earlier commit say. Each side is a process of its own
that holds the model and waits; in each round one after the other does the same work, and the ratio
of the two is taken round by round (this over that: above 1 is faster, and of memory and start below
1 is less). The median of the ratios is given with an interval that holds the true one 95 times of
100 (order statistics of the rounds, no assumption on their distribution): pieces of work are short
and rounds many, since the clock of a shared machine moves by the minute. `start` begins a fresh
process for each sample, from its first instruction to its end behind the first token, with files
that are warm and modules that are compiled, also where the shell forbids Python to keep those.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIDE = """
import json, resource, sys, time
begin = time.perf_counter()
from headrace import LLM, SamplingParams
llm = LLM(sys.argv[1])
def run(prompts, tokens):
    wish = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], wish)
    return time.perf_counter() - begin
print("ready", flush=True)
for line in sys.stdin:
    prompts, tokens = json.loads(line)
    seconds = run(prompts, tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([seconds, peak]), flush=True)
"""
"""Runs in either installation, so it uses what both have."""

START = """
import sys
from headrace import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=1))
"""


class Side:
    """One installation's process."""

    def __init__(self, python: str, model: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", SIDE, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            sys.exit(f"{python} could not load {model}")

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """(seconds, peak resident MiB so far)."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([prompts, tokens]) + "\n")
        self._process.stdin.flush()
        seconds, peak = json.loads(self._process.stdout.readline())
        return seconds, peak

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def prompts(count: int, length: int, round_: int) -> list[list[int]]:
    """Ids that no earlier prompt shares."""
    return [
        [
            1000 + (7919 * (place + 1) + 131 * number + 17 * round_) % 90_000
            for place in range(length)
        ]
        for number in range(count)
    ]


def interval(ordered: list[float]) -> tuple[float, float]:
    """Around the median, at 95 %; of few samples all of them."""
    count, chance, place = len(ordered), 0.0, 0
    while place < count // 2:
        chance += math.comb(count, place) / 2**count
        if chance > 0.025:
            break
        place += 1
    place = max(0, place - 1)
    return ordered[place], ordered[-1 - place]


WORK = {
    "decode": (1, 8, 8),
    "prefill_512": (1, 512, 1),
    "prefill_2048": (1, 2048, 1),
    "concurrent_32": (32, 32, 16),
}
"""Name → (prompts, tokens of each, tokens of each answer)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", required=True)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=[*WORK, "start"], default=[*WORK, "start"])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pythons = [sys.executable, arguments.against]
    found: dict[str, Any] = {}

    def say(name: str, samples: list[list[float]], *, faster: bool) -> None:
        ratios = [there / here if faster else here / there for here, there in samples]
        low, high = interval(sorted(ratios))
        found[name] = {
            "rounds": len(ratios),
            "seconds": [statistics.median(one) for one in zip(*samples, strict=True)],
            "ratio": statistics.median(ratios),
            "interval": [low, high],
            "least": min(ratios),
            "most": max(ratios),
        }
        print(
            f"{name}: x{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}, 95 %; "
            f"{len(ratios)} rounds of {min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )

    work = [name for name in arguments.only if name != "start"]
    if work:
        sides = [Side(python, arguments.model) for python in pythons]
        peaks = [0.0, 0.0]
        try:
            for name in work:
                count, length, tokens = WORK[name]
                samples = []
                for number in range(-1, arguments.rounds):
                    seconds = [0.0, 0.0]
                    for place in (0, 1) if number % 2 else (1, 0):
                        seconds[place], peaks[place] = sides[place].run(
                            prompts(count, length, number), tokens
                        )
                    if number >= 0:
                        samples.append(seconds)
                say(name, samples, faster=True)
        finally:
            for side in sides:
                side.close()
        found["peak_mib"] = peaks
        print(f"peak memory: {peaks[0]:.0f} MiB of {peaks[1]:.0f}, x{peaks[0] / peaks[1]:.3f}")
    if "start" in arguments.only:
        samples = []
        forbids = "PYTHONDONTWRITEBYTECODE"
        environment = {name: value for name, value in os.environ.items() if name != forbids}
        for number in range(-1, arguments.rounds):
            seconds = [0.0, 0.0]
            for place in (0, 1) if number % 2 else (1, 0):
                begin = time.perf_counter()
                subprocess.run(
                    [pythons[place], "-c", START, arguments.model], check=True, env=environment
                )
                seconds[place] = time.perf_counter() - begin
            if number >= 0:
                samples.append(seconds)
        say("start", samples, faster=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

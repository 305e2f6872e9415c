"""One model shared by processes, beside one process with as many threads: bits, speed, memory.

`python benchmarks/ranks.py --json benchmarks/results/ranks.json`

Both stand at the same time and take turns: a prompt (its first token), four at once, then tokens
one by one, of one sequence and of eight; medians of the rounds and of their ratios. What a process
was busy is the time that the system says it had a core or waited for one: of stages the busiest
sets the time of the ideal, in which it never waits for another. Memory is what smaps says of the
processes of a server that compute, each layout alone and with a copy of the kept weights that
nobody else maps: pages that several of them map count once (PSS). An exchange is timed between two
teams of one thread, beside the barrier of one of two. A start is from a server's command until it
says that it is ready, of all layouts in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "server"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "route"))

import httpx
from kill_streams import group_of
from processes import headrace, running

from headrace import LLM, SamplingParams
from headrace.base.environment import cache_root
from headrace.base.hardware import cpu
from headrace.base.layout import Layout
from headrace.dist.commons import Commons, make_commons
from headrace.engine.ends import JoinedEnd
from headrace.engine.group import GroupExecutor
from headrace.kernels.cpu import emit
from headrace.kernels.cpu.library import Team
from headrace.kernels.cpu.records import HrStep

PROMPT, PROMPTS, DECODE, ROWS = 512, 4, 96, 8
KINDS = ("prompt", "prompts", "token", "eight")
ASKED = (6, 12, 11, 12)
"""Tokens of the prompts whose answers are compared."""


def opened(model: str, layout: str, threads: int, **more: Any) -> LLM:
    return LLM(
        model,
        layout=layout,
        threads=threads,
        offline=True,
        max_context=4096,
        max_sequences=8,
        prefix_cache=False,
        speculate="off",
        kv_memory="512MiB",
        **more,
    )


def pids(llm: LLM) -> list[int]:
    """The processes that compute, of those that this one has started."""
    executor = llm._engine.core.executor
    others = executor._others if isinstance(executor, GroupExecutor) else []
    ends = [other.end for other in others]
    return [os.getpid(), *(end.pid for end in ends if not isinstance(end, JoinedEnd))]


def serving(model: str, layout: str, threads: int, folder: Path) -> list[str]:
    """A server's command; in the `folder` are weights that nobody else maps."""
    flags = ["--layout", layout, "--threads", str(threads), "--cache-dir", str(folder)]
    flags += ["--port", "0", "--max-sequences", "8", "--max-context", "4096", "--offline"]
    flags += ["--no-prefix-cache", "--speculate", "off", "--kv-memory", "512MiB"]
    return headrace("serve", model, *flags)


def served_pss(command: list[str]) -> int:
    """Bytes of the processes of a server that compute, behind a prompt and some tokens."""
    with running(command) as server:
        name = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
        for prompt in drawn(0, (6, 120)):
            asked = {"model": name, "prompt": prompt, "max_tokens": 16}
            httpx.post(f"{server.url}/v1/completions", json=asked, timeout=600).raise_for_status()
        return sum(pss(pid) for pid in group_of(server))


def starts(commands: dict[str, list[str]], rounds: int) -> dict[str, list[float]]:
    """Seconds of so many starts, by layout."""
    found: dict[str, list[float]] = {layout: [] for layout in commands}
    for _ in range(rounds):
        for layout, command in commands.items():
            begin = time.perf_counter()
            with running(command):
                found[layout].append(time.perf_counter() - begin)
    return found


def pss(pid: int) -> int:
    """Bytes; pages that several processes map are shared out among them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def drawn(seed: int, sizes: Sequence[int]) -> list[list[int]]:
    """Prompts of so many tokens: ids, since files of a shape alone know no text."""
    draws = random.Random(seed)
    return [[draws.randrange(1000, 30_000) for _ in range(size)] for size in sizes]


def answers(llm: LLM, tokens: int) -> list[Any]:
    wishes = [
        SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=1),
        SamplingParams(temperature=1.0, seed=7, max_tokens=tokens),
    ]
    asked = drawn(0, ASKED)
    return [
        [(one.token_ids, one.logprobs) for one in output.outputs]
        for wish in wishes
        for output in llm.generate(asked, wish)
    ]


def busy(llm: LLM) -> list[float]:
    """Seconds for which each process's first thread has had a core or waited for one."""
    told = [Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split() for pid in pids(llm)]
    return [1e-9 * (int(ran) + int(waited)) for ran, waited, _ in told]


def timed(
    llm: LLM, seed: int, kinds: Sequence[str] = KINDS
) -> dict[str, tuple[float, list[float]]]:
    """Seconds to the first token of a prompt, of a prompt of several at once, of a token of one
    sequence, and of one of each of eight; and what each process was busy of them."""
    prompts = drawn(seed, [PROMPT] * (PROMPTS + 1))
    short = [prompts[0][at : at + 16] for at in range(ROWS)]
    found = {}
    for kind, given, tokens, parts in (
        ("prompt", prompts[:1], 1, 1),
        ("prompts", prompts[1:], 1, PROMPTS),
        ("token", short[:1], DECODE, DECODE),
        ("eight", short, DECODE, DECODE),
    ):
        if kind not in kinds:
            continue
        before, begin = busy(llm), time.perf_counter()
        llm.generate(given, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
        seconds = time.perf_counter() - begin
        was = [(after - one) / parts for after, one in zip(busy(llm), before, strict=True)]
        found[kind] = seconds / parts, was
    return found


def speeds(alone: LLM, shared: LLM, rounds: int, *, stages: bool) -> dict[str, Any]:
    both = [(timed(alone, seed), timed(shared, seed)) for seed in range(rounds)]
    found = {}
    for kind in both[0][0]:
        times = [(one[kind][0], *two[kind]) for one, two in both]
        found[kind] = {
            "alone_ms": 1e3 * statistics.median(one for one, _, _ in times),
            "shared_ms": 1e3 * statistics.median(two for _, two, _ in times),
            "speed": statistics.median(one / two for one, two, _ in times),
            "least": min(one / two for one, two, _ in times),
            "most": max(one / two for one, two, _ in times),
        }
        if stages:  # Ranks of one stage look for each other while they wait, and so are busy.
            found[kind] |= {
                "ideal_speed": statistics.median(one / max(was) for one, _, was in times),
                "of_ideal": statistics.median(max(was) / two for _, two, was in times),
            }
    return found


def exchange_seconds(rounds: int, count: int = 4000) -> dict[str, float]:
    """Seconds of one exchange of two ranks, and of the barrier of a team of two threads."""
    descriptor, step = make_commons(), HrStep(n=1)
    teams = [Team(1), Team(1)]
    boards = [Commons(descriptor, 2, rank) for rank in range(2)]
    programs = [emit.program([emit.exchange(commons, 0, [])] * count) for commons in boards]
    pair, nothing = (
        Team(2),
        emit.program([emit.select(emit.Matrix(0, 0), emit.Matrix(0, 0), 0)] * count),
    )
    found: dict[str, list[float]] = {"exchange": [], "barrier": []}
    with ThreadPoolExecutor(1) as thread:
        for _ in range(rounds):
            begin = time.perf_counter()
            other = thread.submit(teams[1].run, programs[1], count, step)
            teams[0].run(programs[0], count, step)
            other.result()
            middle = time.perf_counter()
            pair.run(nothing, count, step)
            found["exchange"].append((middle - begin) / count)
            found["barrier"].append((time.perf_counter() - middle) / count)
    os.close(descriptor)
    return {f"{name}_us": 1e6 * statistics.median(seconds) for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--layouts", nargs="+", default=["TP2", "TP3", "TP4"])
    parser.add_argument("--threads", type=int, default=cpu().cores)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, threads = arguments.model, arguments.threads
    found: dict[str, dict[str, Any]] = {}
    with opened(model, "1", threads) as alone:
        wanted = answers(alone, arguments.tokens)
    with tempfile.TemporaryDirectory() as folder:
        # The first start packs the weights and keeps them: the second is the one that counts.
        Path(folder, "models").symlink_to(cache_root() / "models")
        layouts = ["1", *arguments.layouts]
        commands = {one: serving(model, one, threads, Path(folder)) for one in layouts}
        served_pss(commands["1"])
        held = {one: served_pss(command) for one, command in commands.items()}
        started = starts(commands, arguments.rounds)
    for layout in arguments.layouts:
        with opened(model, layout, threads) as shared:
            equal = answers(shared, arguments.tokens) == wanted
            found[layout] = {"equal": equal, "pss_mb": round(held[layout] / 1e6)}
            found[layout]["pss_share"] = round(held[layout] / held["1"], 3)
            ratios = [a / b for a, b in zip(started[layout], started["1"], strict=True)]
            found[layout]["start_s"] = [round(one, 2) for one in started[layout]]
            found[layout]["start_share"] = round(statistics.median(ratios), 2)
            if Layout.parse(layout).devices <= threads:
                with opened(model, "1", threads) as alone:
                    found[layout] |= speeds(
                        alone, shared, arguments.rounds, stages=Layout.parse(layout).pp > 1
                    )
        print(layout, json.dumps(found[layout]), flush=True)
    report = {
        "model": model,
        "threads": threads,
        "alone_pss_mb": round(held["1"] / 1e6),
        "alone_start_s": [round(one, 2) for one in started["1"]],
        **exchange_seconds(arguments.rounds),
        "layouts": found,
    }
    print(json.dumps({name: value for name, value in report.items() if name != "layouts"}))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

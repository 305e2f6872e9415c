"""Micro-benchmarks of the control plane: what one step and one prefix match cost the CPU.

    python benchmarks/control_plane.py [--json FILE]

Medians of many repetitions, in microseconds, on one thread. The scheduler benchmarks run the
real scheduler and KV manager against ready-made results, so that only their own time is counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.base.request import Request
from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import GroupShape, PoolShape, StepPlan, StepResult
from headrace.kv import KvManager, PrefixChain
from headrace.sched import Limits, Scheduler

BLOCK = 16
SEQUENCES = 1024


def pool(windows: tuple[int | None, ...], blocks: int) -> PoolShape:
    groups = (GroupShape(f"g{i}", (i,), window, blocks) for i, window in enumerate(windows))
    return PoolShape(BLOCK, tuple(groups))


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    return Request(name, prompt, RequestSpec(SamplingParams(max_tokens=max_tokens), 0, (0,)))


def answer(plan: StepPlan) -> StepResult:
    return StepResult(plan.number, [[5] if samples else [] for samples in plan.samples])


def decode_steps(windows: tuple[int | None, ...], depth: int) -> dict[str, float]:
    """Step over 1,024 running sequences that all decode: `schedule` and `update` apart."""
    limits = Limits(SEQUENCES, 8192, 4096, SEQUENCES, depth=depth)
    scheduler = Scheduler(limits, KvManager(pool(windows, SEQUENCES * 20)))
    for i in range(SEQUENCES):
        # Different lengths: each step, one sequence in sixteen needs a new block.
        scheduler.add(request(f"r{i}", [i + 1, *range(1, 100 + i % BLOCK)], 200))
    plans: list[StepPlan] = []
    while len(plans) < 20 or len(plans[-1].rows) < SEQUENCES:
        plan = scheduler.schedule()
        assert plan is not None
        plans.append(plan)
        if len(plans) >= depth:
            first = plans[-depth]
            scheduler.update(first, answer(first))
    schedule, update = [], []
    gc.disable()
    for _ in range(3 * BLOCK):
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None
        assert len(plan.rows) == SEQUENCES
        plans.append(plan)
        first = plans[-depth]
        result = answer(first)
        before = time.perf_counter()
        deltas = scheduler.update(first, result)
        update.append(time.perf_counter() - before)
        assert len(deltas) == SEQUENCES
        schedule.append(middle - start)
    gc.enable()
    return {"schedule": median(schedule), "update": median(update)}


def prefix_match(tokens: int) -> dict[str, float]:
    """Per 1,000 tokens: hashing a new prompt, and finding a prompt whose keys are known."""
    kv = KvManager(pool((None,), 2 * tokens // BLOCK + 8))
    prompt = [(i * 7919) % 150_000 for i in range(tokens)]
    chain = PrefixChain(b"", BLOCK, prompt)
    table = kv.open(tokens, chain, read=True)
    kv.grow(table, 0, 0, tokens, [])
    kv.enter(table, tokens, step=None)
    kv.close(table)
    per = 1000 / tokens

    def cold() -> None:
        PrefixChain(b"", BLOCK, prompt).extend(tokens // BLOCK)

    def match() -> None:
        kv._longest(chain.keys, tokens // BLOCK)

    def hit() -> None:
        found = kv.open(tokens, chain, read=True)
        kv.close(found)

    def whole() -> None:
        found = kv.open(tokens, PrefixChain(b"", BLOCK, prompt), read=True)
        assert kv.cached(found) >= tokens - BLOCK
        kv.close(found)

    return {
        "hash": timed(cold) * per,
        "match": timed(match) * per,
        "match, share and give back": timed(hit) * per,
        "hash, match, share and give back": timed(whole) * per,
    }


def admissions() -> float:
    """One request from `add` to its end: prompt of 128 tokens, one token out."""
    kv = KvManager(pool((None,), 4096))
    scheduler = Scheduler(Limits(64, 8192, 4096, 10_000), kv)
    names: Iterator[int] = iter(range(10**9))
    prompt = list(range(1, 129))

    def one() -> None:
        name = next(names)
        scheduler.add(request(str(name), [name % 100_000 + 1, *prompt], 1))
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, answer(plan))

    return timed(one)


def timed(call: Callable[[], None], seconds: float = 0.5) -> float:
    """Median seconds of a call, over at least 20 and at most `seconds` of them."""
    samples: list[float] = []
    gc.disable()
    end = time.perf_counter() + seconds
    while len(samples) < 20 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    gc.enable()
    return median(samples)


def median(samples: list[float]) -> float:
    return statistics.median(samples)


def measure() -> dict[str, float]:
    results: dict[str, float] = {}
    for name, windows, depth in (
        ("full, depth 1", (None,), 1),
        ("full, depth 2", (None,), 2),
        ("full and sliding, depth 1", (None, 64), 1),
    ):
        for part, seconds in decode_steps(windows, depth).items():
            results[f"step of {SEQUENCES} decodes, {name}: {part}"] = seconds * 1e6
    for part, seconds in prefix_match(16_000).items():
        results[f"prefix of 1,000 tokens: {part}"] = seconds * 1e6
    results["request of 128 tokens, add to end"] = admissions() * 1e6
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    results = measure()
    for name, microseconds in results.items():
        print(f"{microseconds:10.1f} µs  {name}")
    if options.json:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        record = {
            "benchmark": "control_plane",
            "commit": commit,
            "python": platform.python_version(),
            "machine": platform.processor() or platform.machine(),
            "unit": "microseconds, median",
            "results": {name: round(value, 2) for name, value in results.items()},
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()

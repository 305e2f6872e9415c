"""What the context cache costs who has nothing of it: a miss, writing, loads beside decoding.

Run: `python benchmarks/context_cache_costs.py OUT.json`. Two engines of the default model in one
process, one with a disk tier and one without, do the same work in turns; then the one with the tier
decodes while prefixes of 1,024 tokens are loaded from files that the system has dropped from its
memory, as it loads some of them before with nothing else to do. What those files hold is made up:
nobody computed it, and nobody looks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace import LLM, SamplingParams
from headrace.base.environment import cache_root
from headrace.base.request import Request
from headrace.base.spec import RequestSpec
from headrace.kv import tiers as policy

PREFIXES, IDLE, LENGTH, ROUNDS = 40, 9, 1024, 9


def random_prompt(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 50000) for _ in range(tokens)]


def opened(folder: Path, size: str, executor: str) -> Any:
    for kept in ("models", "panels", "hardware"):
        if (cache_root() / kept).exists():
            with suppress(FileExistsError):
                (folder / kept).symlink_to(cache_root() / kept)
    llm = LLM(context_cache=size, cache_dir=str(folder), executor=executor, speculate="off")
    llm.generate([[1] * 12], SamplingParams(max_tokens=4))
    return llm


def served(llm: Any, seed: int) -> float:
    """Seconds of four prompts that nobody has seen, with 24 tokens of answer each."""
    prompts = [random_prompt(seed + at, 256) for at in range(4)]
    begin = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    return time.perf_counter() - begin


def in_turns(plain: Any, tiered: Any) -> dict[str, Any]:
    """Cost of a miss with what is written for it, and of the miss alone, as shares, by medians of
    ratios of neighbours."""
    ratios: dict[str, list[float]] = {"written": [], "missed": []}
    for round in range(ROUNDS):
        for name, most in (("written", 64), ("missed", 0)):
            policy.MOST_WRITING = most
            pair = [(plain, 0), (tiered, 1)]
            if round % 2:
                pair.reverse()
            took = {at: served(llm, 10_000 + 100 * round + 10 * most) for llm, at in pair}
            ratios[name].append(took[1] / took[0])
            tiered._built.context.settle()
    policy.MOST_WRITING = 64
    median = statistics.median
    found = {"writing": median(ratios["written"]) - 1, "miss": median(ratios["missed"]) - 1}
    return found | {"ratios": ratios}


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.glob("kv/*/*/*") if path.stat().st_size > 1000]


def drop(files: list[Path]) -> None:
    """Out of the system's memory."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def disk_rate(files: list[Path]) -> float:
    """Bytes a second of the files, read whole by two threads into one buffer each."""
    drop(files)
    size = max(path.stat().st_size for path in files)

    def read(half: list[Path]) -> int:
        buffer, total = memoryview(bytearray(size)), 0
        for path in half:
            file = os.open(path, os.O_RDONLY)
            total += os.preadv(file, [buffer], 0)
            os.close(file)
        return total

    begin = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        total = sum(threads.map(read, [files[::2], files[1::2]]))
    return total / (time.perf_counter() - begin)


def request(name: str, prompt: list[int], tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return Request(name, prompt, RequestSpec(sampling, seed=1), arrival=time.monotonic())


def beside_loads(llm: Any) -> dict[str, float]:
    """Steps of four sequences that decode, with and without a load under way, in turns: a load
    begins when as many steps went without as the one before it took, and eight at least."""
    core, tiers = llm._built.core, llm._built.context.tiers
    for at in range(4):
        core.add(request(f"decodes-{at}", random_prompt(900 + at, 64), 900))
    steps: dict[bool, list[float]] = {True: [], False: []}
    before = tiers.stats.loaded_bytes, tiers.stats.load_seconds
    number, beside, without = IDLE, 0, 0
    while core.has_work:
        if not tiers._loading and without > max(8, beside) and number < PREFIXES:
            core.add(request(f"loads-{number}", random_prompt(number, LENGTH), 1))
            number, beside, without = number + 1, 0, 0
        begin = time.perf_counter()
        loading = bool(tiers._loading)
        plain = core.scheduler.running == 4
        core.turn()
        loading |= bool(tiers._loading)
        if plain and core.scheduler.running == 4:
            steps[loading].append(time.perf_counter() - begin)
            beside, without = beside + loading, without + (not loading)
    nbytes = tiers.stats.loaded_bytes - before[0]
    p99 = {way: statistics.quantiles(took, n=100)[98] for way, took in steps.items()}
    return {
        "steps_beside_loads": len(steps[True]),
        "steps_without": len(steps[False]),
        "p99_beside_loads": p99[True],
        "p99_without": p99[False],
        "median_beside_loads": statistics.median(steps[True]),
        "median_without": statistics.median(steps[False]),
        "loaded_bytes": nbytes,
        "load_rate_beside": nbytes / max(1e-9, tiers.stats.load_seconds - before[1]),
        "p99_ratio": p99[True] / p99[False],
    }


def rates(llm: Any, folder: Path) -> dict[str, float]:
    """Bytes a second of the disk, and of loads with nothing beside them, in turns; medians."""
    stats, files = llm._built.context.tiers.stats, files_of(folder)
    disk, loads = [], []
    for turn in range(IDLE):
        disk.append(disk_rate(random.Random(turn).sample(files, 640)))
        drop(files)
        before = stats.loaded_bytes, stats.load_seconds
        llm.generate([random_prompt(turn, LENGTH)], SamplingParams(max_tokens=1))
        loads.append((stats.loaded_bytes - before[0]) / (stats.load_seconds - before[1]))
    ratio = statistics.median(load / rate for load, rate in zip(loads, disk, strict=True))
    median = statistics.median
    return {
        "disk_rate": median(disk),
        "load_rate": median(loads),
        "load_rate_of_disk": ratio,
    }


def make_up(llm: Any) -> None:
    """Blocks of all prefixes on the disk."""
    built = llm._built
    kv, [tier] = built.context.tiers.kv, built.context._mover._tier.tiers
    size = built.context.tiers._bytes[0]
    part = memoryview(bytearray(size // 48))
    for at in range(PREFIXES):
        chain = kv.chain(request("made up", prompt := random_prompt(at, LENGTH), 1), prompt)
        for depth, key in enumerate(chain.extend(LENGTH // kv.block_size)):
            assert tier.write(key, 0, chain.tenant, [part] * 48, depth)
    os.sync()  # What is written can be dropped.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", choices=("loads", "neighbours"))
    parser.add_argument("--executor", choices=("inline", "multiproc"), default="inline")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.home()) as name:
        folder = Path(name)
        policy.CANARY = 1 << 30
        with opened(folder, "4GiB", given.executor) as tiered:
            tiered._built.context.settle()
            found: dict[str, Any] = {}
            if given.only != "neighbours":
                make_up(tiered)
                found |= rates(tiered, folder) | beside_loads(tiered)
            if given.only != "loads":
                with opened(folder, "0", given.executor) as plain:
                    found |= in_turns(plain, tiered)
            found["damaged"] = tiered._built.context.tiers.stats.damaged
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

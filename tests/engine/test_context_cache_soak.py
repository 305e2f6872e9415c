"""A disk tier that is full all the time: right answers, bounded files, nothing that grows.

So many requests in CI; `HEADRACE_SOAK=1800` goes on for half an hour.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_fakes import OPTIONS

from headrace import LLM, SamplingParams
from headrace.worker.disk import stored_blocks

SECONDS = float(os.environ.get("HEADRACE_SOAK", "0"))
LIMIT = 50_000_000
ROUNDS, PROMPTS, LIVES = 60, 16, 3
"""Rounds of a life of the engine, prompts of one, and lives, at least."""


def prompt_of(seed: int) -> list[int]:
    draw = random.Random(seed)
    shared = [draw.randrange(250) for _ in range(64)] if seed % 3 else [7] * 64
    return [*shared, *(draw.randrange(250) for _ in range(seed % 97 + 150))]


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 1800)
def test_a_tier_of_50_mb_for_a_long_time(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of two callers come again after a while, in a pool of 50 of them; lives end and
    begin; now and then a file is harmed."""
    monkeypatch.setattr("headrace.kv.tiers.LATENCY", -1e9)
    draw, answers = random.Random(1), dict[int, list[int]]()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    begin, lives, loads, made_room, memory = time.monotonic(), 0, 0, 0, []
    options: dict[str, Any] = {**OPTIONS, "kv_dtype": "float32", "context_cache": str(LIMIT)}
    while lives < LIVES or time.monotonic() - begin < SECONDS:
        with LLM(str(tiny), **options, cache_dir=str(tmp_path)) as llm:
            context = llm._built.context  # type: ignore[union-attr]
            assert context is not None
            context.settle()
            [tier] = context._mover._tier.tiers
            for _ in range(ROUNDS):
                seeds = [draw.randrange(1200) for _ in range(PROMPTS)]
                given = llm.generate([prompt_of(seed) for seed in seeds], params)
                before = tier.nbytes
                context.settle()
                made_room += tier.nbytes < before
                for seed, output in zip(seeds, given, strict=True):
                    tokens = list(output.outputs[0].token_ids)
                    assert answers.setdefault(seed, tokens) == tokens, seed
            found = stored_blocks(tmp_path / "kv")
            assert sum(block.nbytes for block in found) <= LIMIT * 1.01
            for block in draw.sample(found, 5):
                block.path.write_bytes(block.path.read_bytes()[:-1])
            loads += context.tiers.stats.loads
            assert context.tiers.stats.wrong == 0
            llm._built.core.scheduler.check_integrity()  # type: ignore[union-attr]
            process = psutil.Process()
            memory.append((process.memory_info().rss, process.num_fds(), process.num_threads()))
        lives += 1
    print(f"{lives} lives, {loads} loads, room made {made_room} times, {memory[0]} {memory[-1]}")
    assert loads > 100
    assert made_room > 0
    assert memory[-1][0] < memory[1][0] + (64 << 20)
    assert memory[-1][1] <= memory[0][1] + 2
    assert memory[-1][2] <= memory[0][2] + 1

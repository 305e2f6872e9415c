"""A tenant's waiting time tells it nothing of another's requests."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import OPTIONS

from headrace import LLM, SamplingParams
from headrace.base.request import Request
from headrace.base.spec import RequestSpec

PAIRS = 120


def mann_whitney(first: list[float], second: list[float]) -> float:
    """Return the standard deviations by which the ranks of two samples are apart."""
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks = sum(rank for rank, (_, group) in enumerate(ranked, start=1) if group == 0)
    n, m = len(first), len(second)
    u = ranks - n * (n + 1) / 2
    return (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)


def seconds(llm: Any, prompt: list[int], salt: str, name: str) -> float:
    core = llm._built.core
    spec = RequestSpec(SamplingParams(max_tokens=1, temperature=0.0), seed=1)
    begin = time.perf_counter()
    core.add(Request(name, prompt, spec, cache_salt=salt, arrival=time.monotonic()))
    while core.has_work:
        core.turn()
    return time.perf_counter() - begin


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["0", "64MiB"])
def test_what_another_tenant_asked_is_as_slow_as_what_nobody_asked(
    tiny: Path, tmp_path: Path, tier: str
) -> None:
    """In turns, so that a slow moment meets both alike. The same test does tell what the tenant
    asked itself, so it would see a leak."""
    rng = random.Random(8)
    asked_by_other: list[float] = []
    asked_by_nobody: list[float] = []
    asked_by_itself: list[float] = []
    options = OPTIONS | {"kv_memory": "16MiB", "context_cache": tier}
    with LLM(str(tiny), **options, cache_dir=tmp_path) as llm:
        for at in range(PAIRS):
            known, unknown = ([rng.randrange(250) for _ in range(400)] for _ in range(2))
            seconds(llm, known, "victim", f"victim-{at}")
            if llm._built.context is not None:
                llm._built.context.settle()
            turns = [(asked_by_other, known, "another"), (asked_by_nobody, unknown, "another")]
            if rng.random() < 0.5:
                turns.reverse()
            for times, prompt, salt in turns:
                times.append(seconds(llm, prompt, salt, f"{salt}-{at}-{len(times)}"))
            asked_by_itself.append(seconds(llm, known, "victim", f"again-{at}"))
    assert abs(mann_whitney(asked_by_other, asked_by_nobody)) < 3.5
    assert mann_whitney(asked_by_nobody, asked_by_itself) > 5

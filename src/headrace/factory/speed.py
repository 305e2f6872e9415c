"""The speed of an engine: certified by a build, and measured again by a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from statistics import median

from ..base.sampling import SamplingParams
from ..engine.clients.face import ServingEngine

PROMPT, TOKENS, ROUNDS, TOGETHER = 16, 24, 3, 8
"""Ids of a prompt, tokens of an answer, repetitions, concurrent answers."""


async def seconds_per_token(engine: ServingEngine) -> float | None:
    """Measure the median time per token of one short answer; None if the model makes vectors.

    A build certifies this figure and a server measures it again.
    """
    if engine.files.arch.task != "tokens":
        return None
    # The first is not counted: it may include first-use costs.
    taken = [await _seconds(engine, [number]) for number in range(ROUNDS + 1)]
    return median(taken[1:])


async def tokens_per_second(engine: ServingEngine) -> float:
    """Measure the median tokens per second of several concurrent answers, up to the last token."""
    firsts = [ROUNDS + 1 + turn * TOGETHER for turn in range(ROUNDS)]
    taken = [await _seconds(engine, range(first, first + TOGETHER)) for first in firsts]
    return 1 / median(taken)


async def _seconds(engine: ServingEngine, numbers: Iterable[int]) -> float:
    """Return the time per token of concurrent answers; no two prompts share a prefix."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    async def answer(number: int) -> int:
        ids = [number + place % 5 + 3 for place in range(PROMPT)]
        return sum([len(delta.token_ids) async for delta in engine.stream(ids, params)])

    begin = time.perf_counter()
    tokens = await asyncio.gather(*map(answer, numbers))
    return (time.perf_counter() - begin) / sum(tokens)

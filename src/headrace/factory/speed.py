"""How fast an engine answers: what a build certifies, and what a server measures again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from statistics import median

from ..base.sampling import SamplingParams
from ..engine.face import ServingEngine

PROMPT, TOKENS, ROUNDS, TOGETHER = 16, 24, 3, 8
"""Ids of a prompt, tokens of an answer, how often it is measured, answers at once."""


async def seconds_per_token(engine: ServingEngine) -> float | None:
    """Time of a single short answer by its tokens, the median; None where the model makes vectors.

    It is what a build certifies and a server repeats.
    """
    if engine.files.arch.task != "tokens":
        return None
    # The first is not counted: it may be the first of its kind.
    taken = [await _seconds(engine, [number]) for number in range(ROUNDS + 1)]
    return median(taken[1:])


async def tokens_per_second(engine: ServingEngine) -> float:
    """Tokens of several answers at once, from the requests to the last token; the median."""
    firsts = [ROUNDS + 1 + turn * TOGETHER for turn in range(ROUNDS)]
    taken = [await _seconds(engine, range(first, first + TOGETHER)) for first in firsts]
    return 1 / median(taken)


async def _seconds(engine: ServingEngine, numbers: Iterable[int]) -> float:
    """Time of these answers at once, by their tokens; no two prompts have the same beginning."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)

    async def answer(number: int) -> int:
        ids = [number + place % 5 + 3 for place in range(PROMPT)]
        return sum([len(delta.token_ids) async for delta in engine.stream(ids, params)])

    begin = time.perf_counter()
    tokens = await asyncio.gather(*map(answer, numbers))
    return (time.perf_counter() - begin) / sum(tokens)

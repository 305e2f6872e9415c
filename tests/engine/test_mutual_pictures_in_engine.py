"""Pictures whose tokens see each other, and pictures with text between their rows, in a whole
engine: answers after prefix hits, preemptions, drafts and beside others are those of an engine that
is alone with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import OPTIONS

from headrace.base.sampling import SamplingParams
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from tiny import gemma_chat, pixtral_chat

pytestmark = pytest.mark.slow
OWN = OPTIONS | {"max_sequences": 8, "threads": 1, "kv_dtype": "float32", "max_context": 224}
LENGTH = 24
KINDS = {
    "gemma3": (gemma_chat.make, gemma_chat.BEGIN, (32, 32), "1100KiB"),
    "llava": (
        lambda folder: pixtral_chat.make(folder, "llava"),
        pixtral_chat.PLACE,
        (32, 40),
        "320KiB",
    ),
    "mistral3": (
        lambda folder: pixtral_chat.make(folder, "mistral3"),
        pixtral_chat.PLACE,
        (48, 64),
        "320KiB",
    ),
}


def asked(prompts: PicturePrompts, size: tuple[int, int], begin: int, *seeds: int) -> Any:
    """Text between pictures, the spans and what holds them."""
    ids, held = [5, 6, 7], []
    for seed in seeds:
        pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
        one = prompts.prepare(pixels)
        held.append(prompts.kept.hold(("", bytes([seed]), False), [one], 0, 0))
        ids += [begin, *range(40, 56)]
    ids, spans = prompts.expand(ids, [one.shape for one in held], held)
    return ids, spans, held


async def answer(engine: AsyncEngine, asking: Any, salt: str) -> Any:
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=3)
    return await engine.generate(asking[0], sampling, inputs=asking[1], cache_salt=salt)


def said(out: Any) -> Any:
    """The tokens of an answer, and the log-probabilities bit for bit."""
    return out.outputs[0].token_ids, out.outputs[0].logprobs


@pytest.mark.parametrize("kind", KINDS)
async def test_one_answer_whatever_the_cache_and_the_others(tmp_path: Path, kind: str) -> None:
    make, begin, size, memory = KINDS[kind]
    make(tmp_path)
    own = OWN | {"model": str(tmp_path), "kv_memory": memory, "step_tokens": 16}
    async with await AsyncEngine.start(**own) as engine:
        prompts = open_picture_prompts(engine.files, engine.tokenizer)
        assert prompts is not None
        seeds = [(1, 2), (2, 1), (1,), (2,), (1, 1), (3, 2, 1), ()]
        asking = [asked(prompts, size, begin, *each) for each in seeds]
        assert len({tuple(each[0]) for each in asking[:2]}) == 1, "placeholders are equal"
        alone = [await answer(engine, each, f"alone {at}") for at, each in enumerate(asking)]
        right = [said(out) for out in alone]
        assert [out.cached_tokens for out in alone] == [0] * len(asking)
        assert len({repr(each) for each in right}) == len(asking), "what is seen is seen"
        twice = [each for one in zip(asking, asking, strict=True) for each in one]
        hits = [await answer(engine, each, "shared") for each in twice]
        assert [said(out) for out in hits] == [each for each in right for _ in range(2)]
        # Blocks before a window may be gone.
        assert sum(out.cached_tokens > 16 for out in hits[1::2]) >= 3
        outs = await asyncio.gather(*(answer(engine, each, "") for each in [*asking, *asking]))
        assert [said(out) for out in outs] == [*right, *right]
        report = await engine.inspect()
        assert (report.running, report.waiting, report.integrity) == (0, 0, "")
        assert engine.stats.preemptions > 0
        decided = {one.name: one.value for one in engine.decisions}
        assert decided.get("step_tokens") == ("24" if kind == "gemma3" else None)
    drafting = own | {"speculate": "ngram", "kv_memory": "auto", "step_tokens": 64}
    async with await AsyncEngine.start(**drafting) as engine:
        outs = await asyncio.gather(*(answer(engine, each, "") for each in asking))
        assert [out.outputs[0].token_ids for out in outs] == [each[0] for each in right]
    prompts.kept.clear()

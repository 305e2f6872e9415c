"""Pictures with grids in a whole engine: answers after prefix hits, preemptions and beside others
are those of an engine that is alone with them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import OPTIONS

from headrace.base.sampling import SamplingParams
from headrace.base.spec import InputSpan
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.kept_pictures import PictureShape
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from tiny.qwen_chat import KINDS, SQUARE, make

pytestmark = pytest.mark.slow
OWN = OPTIONS | {"max_sequences": 8, "step_tokens": 48, "threads": 1, "kv_dtype": "float32"}
OWN |= {"max_context": 192, "kv_memory": "288KiB"}
TALL, WIDE = (4, 2), (2, 4)
LENGTH = 24


def tile(seed: int, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Pixels of rows × columns squares; the squares of one seed are the same in every shape."""
    rows, columns = shape
    cells = np.random.default_rng(seed).integers(0, 256, (8, SQUARE, SQUARE, 3), np.uint8)
    grid = cells.reshape(rows, columns, SQUARE, SQUARE, 3).transpose(0, 2, 1, 3, 4)
    return np.ascontiguousarray(grid.reshape(rows * SQUARE, columns * SQUARE, 3))


def asked(prompts: PicturePrompts, *given: tuple[int, tuple[int, int]]) -> tuple[Any, Any, Any]:
    """Text between pictures, the spans and what holds them."""
    ids, spans, held = [5, 6, 7], [], []
    for seed, shape in given:
        one = prompts.prepare(tile(seed, shape))
        held.append(prompts.payloads.hold("", one.patches, prompts.levels))
        source, units = held[-1].source, len(one.patches)
        spans.append(
            InputSpan(len(ids), one.rows, "picture", one.digest, source, units, one.columns)
        )
        ids += [*prompts.ids(PictureShape(0, 0, one.rows)), *range(40, 56)]
    return ids, spans, held


async def answer(engine: AsyncEngine, asking: tuple[Any, Any, Any], salt: str) -> Any:
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=3)
    return await engine.generate(asking[0], sampling, inputs=asking[1], cache_salt=salt)


def said(out: Any) -> Any:
    """The tokens of an answer, and the log-probabilities bit for bit."""
    return out.outputs[0].token_ids, out.outputs[0].logprobs


@pytest.mark.parametrize("kind", KINDS)
async def test_one_answer_whatever_the_cache_and_the_others(tmp_path: Path, kind: str) -> None:
    make(tmp_path, kind)
    async with await AsyncEngine.start(**OWN, model=str(tmp_path)) as engine:
        prompts = open_picture_prompts(engine.files, engine.tokenizer)
        assert prompts is not None
        one, two = (1, TALL), (2, TALL)
        asking = [
            asked(prompts, *each)
            for each in [
                [one, two], [two, one], [one], [(1, WIDE)], [two], [one, one], [(1, WIDE), two], []
            ]
        ]  # fmt: skip
        assert len({tuple(each[0]) for each in asking[:2]}) == 1, "placeholders are equal"
        assert len({tuple(each[0]) for each in asking[2:5]}) == 1
        alone = [await answer(engine, each, f"alone {at}") for at, each in enumerate(asking)]
        right = [said(out) for out in alone]
        assert [out.cached_tokens for out in alone] == [0] * len(asking)
        assert len({repr(each) for each in right}) == len(asking), "what is seen is seen"
        # One after the other with one cache: prefixes that end in text, and within pictures.
        twice = [each for one in zip(asking, asking, strict=True) for each in one]
        hits = [await answer(engine, each, "shared") for each in twice]
        assert [said(out) for out in hits] == [each for each in right for _ in range(2)]
        assert all(out.cached_tokens for out in hits[1:-1:2])
        # All at once, in less room than they need.
        outs = await asyncio.gather(*(answer(engine, each, "") for each in [*asking, *asking]))
        assert [said(out) for out in outs] == [*right, *right]
        report = await engine.inspect()
        assert (report.running, report.waiting, report.integrity) == (0, 0, "")
        assert engine.stats.preemptions > 0
        for each in asking:
            for held in each[2]:
                held.close()

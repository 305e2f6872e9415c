"""Pictures in a whole engine whose worker dies within a slice: each request has one answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import OPTIONS
from slicing_worker import DIES, FAILS, SLICING

from headrace.base.errors import EngineFault
from headrace.base.sampling import SamplingParams
from headrace.base.spec import InputSpan
from headrace.dist.payloads import SealedInput
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.kept_pictures import PictureShape
from headrace.engine.clients.pictures import PicturePrompts, open_picture_prompts
from headrace.engine.clients.supervision import Supervision
from tiny.seeing_chat import PLACE, TILE, make

pytestmark = pytest.mark.slow
OWN = OPTIONS | {"max_sequences": 4, "step_tokens": 64, "threads": 1}
OWN |= {"kv_dtype": "float32", "max_context": 512}
ROWS, COLUMNS = 1, 2


def asked(prompts: PicturePrompts, seed: int) -> tuple[list[int], list[InputSpan], SealedInput]:
    """A prompt with a picture of two tiles and its whole, in one memory."""
    draw, count = np.random.default_rng(seed), ROWS * COLUMNS + 1
    tiles = draw.integers(0, 256, (count, TILE, TILE, 3), dtype=np.uint8)
    made = [prompts.prepare(tile) for tile in tiles]
    held = prompts.payloads.hold("", np.concatenate([one.patches for one in made]), prompts.levels)
    rows, units = made[0].rows, len(made[0].patches)
    tokens, spans, at = prompts.ids(PictureShape(ROWS, COLUMNS, rows)), [], 0
    for number, one in enumerate(made):
        at = tokens.index(PLACE, at)
        source = held.part(number * units, units)
        spans.append(InputSpan(2 + at, rows, "picture", one.digest, source, units))
        at += rows
    return [5, 6, *tokens, 7], spans, held


async def answer(engine: AsyncEngine, ids: list[int], spans: Any = (), salt: str = "") -> Any:
    """Return the tokens of an answer, or the error that ended it."""
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    try:
        out = await engine.generate(ids, sampling, inputs=spans, cache_salt=salt)
    except EngineFault as error:
        return error
    return out.outputs[0].token_ids


@pytest.mark.parametrize("what", [DIES, FAILS])
async def test_each_request_with_a_picture_has_one_answer(
    tmp_path: Path, supervision: Supervision, notes: Path, what: str
) -> None:
    folder = tmp_path / "seeing_chat"
    make(folder)
    options = OWN | {"model": str(folder)}
    async with await AsyncEngine.start(
        worker=SLICING, supervision=supervision, **options
    ) as engine:
        prompts = open_picture_prompts(engine.files, engine.tokenizer)
        assert prompts is not None
        one, two = asked(prompts, 1), asked(prompts, 2)
        right = [await answer(engine, *each[:2], salt="before") for each in (one, two)]
        assert all(len(tokens) == 8 for tokens in right)
        assert right[0] != right[1]
        (notes / what).touch()
        ended = await asyncio.gather(
            *(answer(engine, *each[:2], salt="now") for each in (one, one, two)),
            answer(engine, [5, 6, 7], salt="now"),
        )
        assert not (notes / what).exists(), "it has happened"
        wanted = [right[0], right[0], right[1]]
        faults = [got for got in ended[:3] if isinstance(got, EngineFault)]
        pairs = zip(ended[:3], wanted, strict=True)
        assert all(isinstance(got, EngineFault) or got == due for got, due in pairs)
        assert len(ended[3]) == 8
        assert bool(faults) == (what == FAILS), "nobody had read of those that a process took along"
        assert engine.health().restarts == (what == DIES)
        again = [await answer(engine, *each[:2], salt="now") for each in (one, two)]
        assert again == right
        report = await engine.inspect()
        assert (report.running, report.waiting, report.integrity) == (0, 0, "")
        for each in (one, two):
            each[2].close()
        assert prompts.payloads.bytes == 0

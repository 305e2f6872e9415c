"""Encodings in a whole engine: each request has one answer, whatever a slice meets."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import HUNG, OPTIONS
from engine_waits import age, until
from slicing_worker import DIES, FAILS, HANGS, SLICING

from headrace.base.config import EngineOptions
from headrace.base.errors import EngineFault
from headrace.base.hardware import hardware
from headrace.base.sampling import SamplingParams
from headrace.base.spec import InputSpan
from headrace.dist.payloads import SealedInput
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.supervision import Supervision
from headrace.engine.loop.start import explain
from headrace.loader import open_model
from headrace.loader.sounds import open_sounds
from headrace.speech.prompts import SoundPrompts
from tiny.hearing_chat import PLACE, make, tokenizer

pytestmark = pytest.mark.slow
OWN = OPTIONS | {"max_sequences": 4, "max_context": 256, "step_tokens": 64, "threads": 1}
OWN |= {"kv_dtype": "float32", "max_context": 512}
PIECES = (
    "<|im_start|>system\nYou hear.<|im_end|>\n<|im_start|>user\nAudio 1: <|audio_bos|>",
    "<|audio_eos|>\nWhat is said?<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hearing_chat")
    make(path)
    return path


def sound(seed: int, seconds: float = 5.3) -> np.ndarray[Any, Any]:
    t = np.arange(int(16_000 * seconds)) / 16_000
    tone = np.sin(2 * np.pi * (200 + 90 * seed + 50 * np.sin(3 * t)) * t) * np.sin(4 * t)
    return (0.3 * tone).astype(np.float32)


def asked(prompts: SoundPrompts, seed: int) -> tuple[list[int], InputSpan, SealedInput]:
    prepared = prompts.prepare(sound(seed))
    held = prompts.payloads.hold("", prepared.features)
    before, after = (list(tokenizer().encode(piece).ids) for piece in PIECES)
    ids = [*before, *[PLACE] * prepared.rows, *after]
    rows, digest, positions = prepared.rows, prepared.digest, prepared.positions
    return ids, InputSpan(len(before), rows, "sound", digest, held.source, positions), held


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


async def answer(engine: AsyncEngine, ids: list[int], *spans: InputSpan, salt: str = "") -> Any:
    """Return the tokens of an answer, or the error that ended it."""
    try:
        out = await engine.generate(ids, greedy(12), inputs=spans, cache_salt=salt)
    except EngineFault as error:
        return error
    return out.outputs[0].token_ids


def metric(engine: AsyncEngine, name: str, **labels: str) -> float | None:
    labels = {"model_name": engine.model_name, "engine": "0", **labels}
    return engine.registry.get_sample_value(name, labels)


def begun(notes: Path) -> list[str]:
    """Digests of the encodings that were begun, in the order of their names."""
    return [path.name.split("-")[2] for path in notes.glob("encoded-*-0")]


@pytest.mark.parametrize("what", [DIES, HANGS, FAILS])
async def test_each_request_has_one_answer(
    folder: Path, supervision: Supervision, notes: Path, what: str
) -> None:
    """Requests of one sound, of another, and of text; the engine dies, hangs or fails in a slice.
    Those that nobody has read of are answered by the next engine, from the same handles."""
    options = OWN | {"model": str(folder)}
    async with await AsyncEngine.start(
        worker=SLICING, supervision=supervision, **options
    ) as engine:
        found = open_sounds(engine.files)
        assert found is not None
        prompts = SoundPrompts(found, "tiny")
        one, two = asked(prompts, 1), asked(prompts, 2)
        right = [await answer(engine, *each[:2], salt="before") for each in (one, two)]
        assert all(len(tokens) == 12 for tokens in right)
        assert right[0] != right[1]
        (notes / what).touch()
        tasks = [
            asyncio.create_task(answer(engine, *each[:2], salt="now"))
            for each in (one, one, two, two, one)
        ]
        tasks.append(asyncio.create_task(answer(engine, [5, 6, 7], salt="now")))
        if what == HANGS:
            await until(lambda: any(notes.glob(f"{HUNG}*")), "it hangs")
            age(engine)
        ended = await asyncio.gather(*tasks)
        text = ended.pop()
        if what == FAILS:
            faults = [one for one in ended if isinstance(one, EngineFault)]
            assert len(faults) in (2, 3), "the readers of the item that failed"
            assert "the item fails" in str(faults[0])
            assert engine.health().restarts == 0
        wanted = [right[at] for at in (0, 0, 1, 1, 0)]
        got = zip(ended, wanted, strict=True)
        assert all(isinstance(a, EngineFault) or a == b for a, b in got)
        if what != FAILS:
            assert ended == wanted, "nobody had read of them"
            assert engine.health().restarts == 1
        assert len(text) == 12
        report = await engine.inspect()
        assert (report.running, report.waiting, report.integrity) == (0, 0, "")
        stats = engine.stats.encodings
        assert stats is not None
        assert stats.waiting == 0
        for each in (one, two):
            each[2].close()
        assert prompts.payloads.bytes == 0


async def test_a_conversation_that_goes_on_encodes_nothing_and_tenants_share_nothing(
    folder: Path, supervision: Supervision, notes: Path
) -> None:
    options = OWN | {"model": str(folder)}
    async with await AsyncEngine.start(
        worker=SLICING, supervision=supervision, **options
    ) as engine:
        found = open_sounds(engine.files)
        assert found is not None
        prompts = SoundPrompts(found, "tiny")
        ids, span, held = asked(prompts, 3)
        first = await asyncio.gather(*(answer(engine, ids, span) for _ in range(3)))
        assert first[0] == first[1] == first[2]
        assert len(begun(notes)) == 1, "one for all who wait"
        again = await answer(engine, ids + first[0], span)
        assert len(again) == 12
        stats = engine.stats.encodings
        assert stats is not None
        assert (stats.computed, stats.waiting) == (1, 0)
        assert await answer(engine, ids, span, salt="another") == first[0]
        stats = engine.stats.encodings
        assert stats is not None
        assert stats.computed == 2
        assert held.source.process == os.getpid()
        assert metric(engine, "headrace:encodings_total", end="computed") == 2
        assert metric(engine, "headrace:encodings_total", end="shared") >= 3
        assert metric(engine, "headrace:encodings_waiting") == 0
        assert metric(engine, "headrace:encodings_bytes") == 2 * 4 * 96 * span.length


async def test_an_engine_that_slept_encodes_again(
    folder: Path, supervision: Supervision, notes: Path
) -> None:
    options = OWN | {"model": str(folder)}
    async with await AsyncEngine.start(
        worker=SLICING, supervision=supervision, **options
    ) as engine:
        found = open_sounds(engine.files)
        assert found is not None
        prompts = SoundPrompts(found, "tiny")
        ids, span, held = asked(prompts, 3)
        first = await answer(engine, ids, span)
        await engine.operations.sleep(1)
        await engine.operations.wake()
        assert await answer(engine, ids, span) == first
        stats = engine.stats.encodings
        assert stats is not None
        assert stats.computed == 2
        held.close()


def test_the_plan_shows_the_part_and_its_memory(folder: Path) -> None:
    files = open_model(str(folder))
    options = EngineOptions(model=str(folder), device="cpu", max_context=512, kv_memory="2MiB")
    decisions, memory = explain(options, files, hardware())
    part = next(one for one in decisions if one.name == "parts")
    assert part.value == "encoder, text"
    assert "5 slices" in part.reason
    assert dict(memory.parts())["encodings"] == memory.encoding_bytes > 16 * 750 * 96 * 4
    memory.verify()

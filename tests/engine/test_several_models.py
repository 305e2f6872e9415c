"""Several models in one engine process: each answers as it does alone, whatever the others do."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import FAKE, OPTIONS, RAISE, continuation
from engine_waits import until

from headrace import LLM
from headrace.base.config import EngineOptions
from headrace.base.errors import DoesNotFit, EngineDead, EngineFault, Overloaded
from headrace.base.sampling import SamplingParams
from headrace.base.several import ModelChoice
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.group import EngineGroup
from headrace.engine.clients.supervision import Supervision
from tiny import bytewise
from tiny import encoder as encoders
from tiny.encoder import write_modules
from tiny.kept import Kept

PROMPTS = ["the water wheel turns", "a", "river " * 30, "what is a mill race?"]


@pytest.fixture(scope="module")
def folders(kept: Kept, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of text and one of vectors."""
    folder = encoders.make(tmp_path_factory.mktemp("encoder"))
    vectors = write_modules(folder, "pooling_mode_mean_tokens", normalise=True)
    return [kept(bytewise.make), kept(bytewise.make, layers=3), vectors]


def choices(folders: list[Path], **more: Any) -> list[ModelChoice]:
    names = [("one", "uno"), ("two",), ("vectors",)]
    return [
        ModelChoice(EngineOptions(**{**OPTIONS, "model": str(folder), **more}), name)
        for folder, name in zip(folders, names, strict=False)
    ]


def greedy(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> list[Any]:
    """The answers of engines of their own: tokens of the models of text, and vectors."""
    found: list[Any] = []
    for folder in folders[:2]:
        with LLM(**{**OPTIONS, "model": str(folder)}) as llm:
            answers = llm.generate(PROMPTS, greedy(30))
            found.append([answer.outputs[0].token_ids for answer in answers])
    with LLM(**{**OPTIONS, "model": str(folders[2])}) as llm:
        found.append([output.vector for output in llm.embed(PROMPTS)])
    return found


@pytest.fixture
async def group(folders: list[Path], supervision: Supervision) -> AsyncIterator[EngineGroup]:
    group = await EngineGroup.start(choices(folders), supervision=supervision)
    yield group
    await group.close()


@pytest.fixture
async def fakes(
    folders: list[Path], supervision: Supervision, notes: Path
) -> AsyncIterator[EngineGroup]:
    chosen = choices(folders[:2])
    group = await EngineGroup.start(chosen, supervision=supervision, worker=FAKE)
    yield group
    await group.close()


async def tokens(engine: AsyncEngine, prompt: str) -> list[int]:
    return (await engine.generate(prompt, greedy(30))).outputs[0].token_ids


async def everything(group: EngineGroup) -> list[Any]:
    """The answers of all models, at once."""
    text = [group.members[0], group.members[1]]
    made = await asyncio.gather(
        *(tokens(engine, prompt) for engine in text for prompt in PROMPTS),
        *(group.members[2].embed(prompt) for prompt in PROMPTS),
    )
    count = len(PROMPTS)
    vectors = [one.vector for one in made[2 * count :]]
    return [made[:count], made[count : 2 * count], vectors]


@pytest.mark.parametrize("depth", [1, 2])
async def test_answers_are_those_of_engines_of_their_own(
    folders: list[Path], alone: list[Any], supervision: Supervision, depth: int
) -> None:
    group = await EngineGroup.start(choices(folders, depth=depth), supervision=supervision)
    try:
        for _ in range(3):
            assert await everything(group) == alone
        for member in group.members.values():
            report = await member.inspect()
            assert (report.running, report.waiting, report.integrity) == (0, 0, "")
    finally:
        await group.close()


async def test_the_memory_is_planned_once(group: EngineGroup) -> None:
    decided = [
        {one.name: one.value for one in member.decisions} for member in group.members.values()
    ]
    assert [one["kv_memory"] for one in decided[:2]] == ["2.0 MiB", "2.0 MiB"]
    assert len({member.engine_pid for member in group.members.values()}) == 1


async def test_the_rule_by_which_kv_is_divided_is_said(
    folders: list[Path], supervision: Supervision
) -> None:
    chosen = choices(folders[:2], kv_memory="auto")
    group = await EngineGroup.start(chosen, supervision=supervision, worker=FAKE)
    await group.close()
    assert len(group.shares) == 2
    assert all("full context" in line or "1/2 of 12.5%" in line for line in group.shares)


async def test_one_that_does_not_fit_is_refused_with_what_lacks(
    folders: list[Path], supervision: Supervision
) -> None:
    chosen = choices(folders[:2])
    chosen[1].options.kv_memory = "100TiB"
    with pytest.raises(DoesNotFit, match="beside the server's other models"):
        await EngineGroup.start(chosen, supervision=supervision)


async def test_a_killed_engine_comes_back_with_all_models(
    group: EngineGroup, alone: list[Any]
) -> None:
    """Each request has one answer: an error if part of it was seen, else that of the next
    engine."""
    seen = [group.members[model].submit("a", greedy(400)) for model in (0, 1)]
    for stream in seen:
        await anext(stream)
        assert stream.show()
    waiting = asyncio.ensure_future(everything(group))
    await asyncio.sleep(0)
    pid = group.first.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    for stream in seen:
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
    assert await waiting == alone
    assert group.first.engine_pid != pid
    assert await everything(group) == alone
    for member in group.members.values():
        assert member.health().restarts == 1


async def test_an_error_of_one_model_is_not_the_others(fakes: EngineGroup) -> None:
    one, two = fakes.members.values()
    good = asyncio.ensure_future(one.generate([65, 66], greedy(50)))
    with pytest.raises(EngineFault, match="the fake raises"):
        await two.generate([RAISE], greedy(5))
    assert (await good).outputs[0].token_ids == continuation([65, 66], 50)


async def test_all_models_sleep_and_wake(group: EngineGroup, alone: list[Any]) -> None:
    assert await everything(group) == alone
    facts = await group.operations.sleep(1)
    assert 4_000_000 < facts["kv_bytes"] < 4 * 2**20
    for member in group.members.values():
        assert not member.health().ready
        with pytest.raises(Overloaded):
            member.submit("a", greedy(2))
    await group.operations.wake()
    assert await everything(group) == alone
    await group.operations.sleep(2)
    await until(lambda: group.first.engine_pid is None, "the process has ended")
    await group.operations.wake()
    assert await everything(group) == alone


async def test_prefixes_are_forgotten_by_all(group: EngineGroup) -> None:
    for model in (0, 1):
        await tokens(group.members[model], PROMPTS[2])
    facts = await group.operations.reset_prefix_cache()
    assert facts["blocks"] >= 2 * (len(PROMPTS[2]) // 16)


async def test_closing_ends_what_is_in_work(fakes: EngineGroup) -> None:
    streams = [member.submit([65], greedy(300)) for member in fakes.members.values()]
    await fakes.close()
    for stream in streams:
        with suppress(EngineDead):
            reasons = [delta.finish_reason async for delta in stream]
            assert reasons[-1] in ("abort", "length")
    assert not any(member.in_work() for member in fakes.members.values())

"""A Whisper and a Moonshine beside models of text in one engine process: every sound and every text
has the answer that it has alone, whatever comes, goes or dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM
from headrace.base.config import EngineOptions
from headrace.base.errors import EngineDead, InvalidRequest, OptionError, Overloaded, ShuttingDown
from headrace.base.sampling import SamplingParams
from headrace.base.several import ModelChoice, read_models
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.group import EngineGroup
from headrace.engine.clients.supervision import Supervision
from headrace.engine.hearing.engine import Hearing, HearingEngine
from headrace.engine.hearing.opening import open_transcriber
from headrace.engine.hearing.options import own_options
from headrace.engine.hearing.records import HearOptions
from headrace.speech.decoding import DecodingOptions
from headrace.speech.transcript import Transcriber
from tiny import bytewise, moonshine
from tiny.kept import Kept

from .whisper_parts import sound

PATIENT = Supervision(late=300.0, hang=300.0, start=300.0, stacks=0.5, back_off=0.1)
SHARED: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "kv_memory": "2MiB",
    "max_sequences": 16,
    "step_tokens": 256,
    "offline": True,
}
SOUNDS = [sound(1, 9.0), sound(2, 4.0)]
PROMPTS = ["the water wheel turns", "a river " * 30]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)


def chosen(folder: Path, *names: str) -> ModelChoice:
    return ModelChoice(EngineOptions(**{**SHARED, "model": str(folder)}), names)


@pytest.fixture(scope="module")
def texts(kept: Kept) -> Path:
    return kept(bytewise.make)


@pytest.fixture(scope="module")
def ears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("moonshine")
    moonshine.make(where)
    return where


@pytest.fixture(scope="module")
def alone(texts: Path, folder: Path, ears: Path, built: None) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name, where in (("whisper", folder), ("moonshine", ears)):
        transcriber = open_transcriber(str(where), 1)
        found[name] = [spoken(transcriber, number) for number in range(len(SOUNDS))]
        transcriber.close()
    with LLM(**{**SHARED, "model": str(texts)}) as llm:
        found["text"] = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, GREEDY)]
    return found


def spoken(transcriber: Transcriber, number: int) -> list[Any]:
    found = transcriber.transcribe(SOUNDS[number], DecodingOptions(language="en"))
    return [(one.start, one.end, one.text, one.tokens) for one in found.segments]


@pytest.fixture
async def group(texts: Path, folder: Path, ears: Path) -> AsyncIterator[EngineGroup]:
    models = [chosen(texts, "text"), chosen(folder, "whisper", "whisper-1"), chosen(ears, "ears")]
    group = await EngineGroup.start(models, supervision=PATIENT)
    yield group
    await group.close()


def begun(engine: Any, number: int, **options: Any) -> Hearing:
    assert isinstance(engine, HearingEngine)
    payload = engine.payload()
    payload.file.write(SOUNDS[number].tobytes())
    return engine.hear(payload, len(SOUNDS[number]), HearOptions(language="en", **options))


async def heard(hearing: Hearing) -> list[Any]:
    pieces = []
    async with asyncio.timeout(240):
        async for news in hearing:
            pieces += [(one.start, one.end, one.text, one.tokens) for one in news.pieces]
    return pieces


async def tokens(engine: Any, prompt: str) -> list[int]:
    assert isinstance(engine, AsyncEngine)
    return (await engine.generate(prompt, GREEDY)).outputs[0].token_ids


async def everything(group: EngineGroup) -> dict[str, list[Any]]:
    """The answers of all models, at once."""
    text, whisper, ears = group.members.values()
    numbers = range(len(SOUNDS))
    made = await asyncio.gather(
        *(heard(begun(whisper, number)) for number in numbers),
        *(heard(begun(ears, number)) for number in numbers),
        *(tokens(text, prompt) for prompt in PROMPTS),
    )
    return {"whisper": made[:2], "moonshine": made[2:4], "text": made[4:]}


@pytest.mark.slow
async def test_all_answer_as_alone(group: EngineGroup, alone: dict[str, list[Any]]) -> None:
    assert await everything(group) == alone
    whisper = group.members[1]
    assert isinstance(whisper, HearingEngine)
    assert whisper.memory["kv_bytes"] > 0, "its K and V are planned"
    assert {member.engine_pid for member in group.members.values()} == {group.first.engine_pid}
    assert whisper.stats.step > 0
    with pytest.raises(InvalidRequest, match="language"):
        whisper.check(HearOptions(language="xx"))
    for number in (0, 1):
        assert await heard(begun(whisper, number)) == alone["whisper"][number]


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_each_has_one_answer_if_the_engine_dies(
    group: EngineGroup, alone: dict[str, list[Any]], how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, or stopped, which its silence shows: what was not seen comes from the next one."""
    # Texts wait for the next one as long as this busy machine takes to start it.
    monkeypatch.setattr("headrace.engine.clients.async_engine.WAIT_FOR_NEXT", 300.0)
    steps = [member.stats.step for member in group.members.values()]
    waiting = asyncio.ensure_future(everything(group))
    while [member.stats.step for member in group.members.values()] == steps:
        await asyncio.sleep(0.01)
    pid = group.first.engine_pid
    assert pid is not None
    os.kill(pid, how)
    if how == signal.SIGSTOP:
        state = Path(f"/proc/{pid}/stat")
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            await asyncio.sleep(0.01)
        channel = group._supervisor._channel
        assert channel is not None
        channel.flush()
        channel.received_at -= 1e6
    assert await waiting == alone
    assert await everything(group) == alone
    assert group.first.engine_pid != pid
    assert [member.health().restarts for member in group.members.values()] == [1, 1, 1]


@pytest.mark.slow
async def test_it_comes_and_goes_while_text_is_served(
    texts: Path, folder: Path, ears: Path, alone: dict[str, list[Any]]
) -> None:
    group = await EngineGroup.start([chosen(texts, "text")], supervision=PATIENT)
    try:
        text = group.first
        for name, where in (("whisper", folder), ("moonshine", ears)):
            writing = asyncio.ensure_future(tokens(text, PROMPTS[0]))
            number = await group.load(chosen(where, name))
            assert await writing == alone["text"][0]
            engine = group.members[number]
            sounds = [begun(engine, one) for one in (0, 1)]
            hearing = asyncio.gather(*map(heard, sounds))
            await asyncio.sleep(0)
            leaving = asyncio.ensure_future(group.unload(number, 240.0))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown, match="unloaded"):
                begun(engine, 0)
            assert await hearing == alone[name], "those in work are finished"
            await leaving
            assert list(group.members) == [0]
        assert await tokens(text, PROMPTS[1]) == alone["text"][1]
    finally:
        await group.close()


@pytest.mark.slow
async def test_all_sleep_and_wake(group: EngineGroup, alone: dict[str, list[Any]]) -> None:
    assert await everything(group) == alone
    await group.operations.sleep(1, "wait")
    for member in list(group.members.values())[1:]:
        assert not member.health().ready
        with pytest.raises(Overloaded, match="sleeps"):
            begun(member, 0)
    await group.operations.wake()
    assert await everything(group) == alone
    await group.operations.sleep(2)
    await group.operations.wake()
    assert await everything(group) == alone


@pytest.mark.slow
async def test_closing_ends_what_is_in_work(group: EngineGroup) -> None:
    sounds = [begun(member, 0) for member in list(group.members.values())[1:]]
    await group.close()
    for one in sounds:
        with pytest.raises(EngineDead):
            await heard(one)


def test_options_of_text_are_not_those_of_a_sound() -> None:
    common = EngineOptions(max_sequences=8, kv_dtype="k8v4", speculate="off", threads=2)
    word = "whisper-base:kv_dtype=float32,name=whisper-1"
    text, speech = read_models(["qwen2.5-coder-0.5b", word], common)
    assert text.options.kv_dtype == "k8v4"
    own = own_options(speech, shared=True)
    assert (own.kv_dtype, own.threads) == ("float32", 2)
    assert own.max_sequences == EngineOptions().max_sequences
    with pytest.raises(OptionError, match="max_sequences means nothing"):
        own_options(text, shared=False)
    (wrong,) = read_models(["whisper-base:max_adapters=2"], common)
    with pytest.raises(OptionError, match="max_adapters means nothing"):
        own_options(wrong, shared=True)

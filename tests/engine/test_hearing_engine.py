"""The engine that hears, by itself: deaths, hangs, cancels, bounds. Whisper base, on noise."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from engine_waits import age, stopped, until

from headrace.base.config import EngineOptions
from headrace.base.errors import DownloadError, EngineDead, InvalidRequest, OptionError, Overloaded
from headrace.base.several import ModelChoice
from headrace.engine.clients.group import EngineGroup
from headrace.engine.clients.supervision import Supervision
from headrace.engine.hearing.engine import Hearing, HearingEngine
from headrace.engine.hearing.records import HearOptions, SoundEnd
from headrace.loader.catalog import CATALOG
from headrace.loader.download import fetch_catalog

pytestmark = pytest.mark.slow


@pytest.fixture
async def engine(supervision: Supervision) -> AsyncIterator[HearingEngine]:
    try:
        fetch_catalog(CATALOG["whisper-base"])
    except DownloadError as error:
        pytest.skip(f"no whisper-base: {error.message}")
    options = EngineOptions(model="whisper-base", max_waiting=3, threads=2)
    group = await EngineGroup.start([ModelChoice(options)], supervision=supervision)
    made = group.members[0]
    assert isinstance(made, HearingEngine)
    yield made
    await group.close()


def begun(engine: HearingEngine, seconds: float = 4.0, **options: object) -> Hearing:
    noise = np.random.default_rng(3).normal(0, 0.05, int(16_000 * seconds)).astype(np.float32)
    payload = engine.payload()
    payload.file.write(noise.tobytes())
    return engine.hear(payload, len(noise), HearOptions(language="en", **options))  # type: ignore[arg-type]


async def end_of(hearing: Hearing) -> SoundEnd:
    async with asyncio.timeout(600):  # It only tells a wait from an end.
        async for news in hearing:
            if news.end is not None:
                return news.end
    raise AssertionError("no end")


async def test_what_is_asked_and_how_much(engine: HearingEngine) -> None:
    assert engine.health().ready
    first = begun(engine)
    with pytest.raises(InvalidRequest, match="language"):
        engine.hear(engine.payload(), 1, HearOptions(language="xx"))
    others = [begun(engine) for _ in range(3)]
    with pytest.raises(Overloaded, match="max_waiting"):
        begun(engine)
    for other in others:
        other.cancel()
    assert (await end_of(first)).seconds == 4.0
    assert not engine.in_work()
    folder = Path(first.payload.path).parent
    while engine._removing:
        await asyncio.wait(engine._removing)
    assert not list(folder.glob("sound-*")), "payloads are left"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sound_outlives_its_process_once(engine: HearingEngine, how: int) -> None:
    """Killed, or stopped: which is seen by its silence. The next one may take its time to start."""
    engine._supervisor._start_seconds = 1e4
    steps = engine.stats.step
    sounds = [begun(engine, live=True), begun(engine)]
    await until(lambda: engine.stats.step > steps, "they are in work")
    if how == signal.SIGSTOP:
        await stopped(engine)
        age(engine)
    else:
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, how)
    ends = await asyncio.gather(*(end_of(sound) for sound in sounds))
    assert [end.seconds for end in ends] == [4.0, 4.0]
    assert engine.health().restarts == 1


async def test_what_kills_twice_is_refused(engine: HearingEngine) -> None:
    sound = begun(engine, 60.0)
    for _ in range(2):
        await until(lambda: engine.health().ready, "it serves")
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        await until(lambda: not engine.health().ready, "its death is seen")
    with pytest.raises(EngineDead):
        await end_of(sound)
    assert not engine.in_work()


async def test_options_that_mean_nothing_are_refused() -> None:
    for fields in ({"max_adapters": 2}, {"device": "cuda"}, {"quantise": "fp8"}):
        with pytest.raises(OptionError):
            await EngineGroup.start([ModelChoice(EngineOptions(model="whisper-base", **fields))])  # type: ignore[arg-type]

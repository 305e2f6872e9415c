"""Sleep and wake of a real engine process: who waits, who is cancelled, who dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import CRAWL, FAKE, continuation
from engine_waits import stopped, until

from headrace.base.errors import EngineDead, Overloaded
from headrace.base.sampling import SamplingParams
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.operations import Asleep
from headrace.engine.clients.supervision import Supervision
from headrace.engine.loop.adapters import LoadedAdapter

PATIENT = Supervision(late=300.0, hang=300.0, start=300.0, back_off=0.1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def started(options: dict[str, Any], worker: str = FAKE) -> Any:
    return AsyncEngine.start(worker=worker, supervision=PATIENT, **options)


def up(engine: AsyncEngine) -> float | None:
    labels = {"model_name": engine.model_name, "engine": "0"}
    return engine.registry.get_sample_value("headrace:engine_up", labels)


async def served(engine: AsyncEngine) -> None:
    answer = await engine.generate([65, 66], GREEDY)
    assert answer.outputs[0].token_ids == continuation([65, 66], 12)


async def cancelled(task: asyncio.Task[Any]) -> None:
    await asyncio.sleep(0.1)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_waits_for_the_process_does_not_wait_for_ever(options: dict[str, Any]) -> None:
    async with await started(options) as engine:
        assert up(engine) == 1
        await stopped(engine)
        engine.adapters.add(LoadedAdapter("one", "/nowhere", "one@1"))
        waiting = [
            asyncio.create_task(engine.inspect()),
            asyncio.create_task(engine.unload_adapter("one")),
            asyncio.create_task(engine.operations.reset_prefix_cache()),
        ]
        await asyncio.sleep(0)
        await engine.operations.sleep(2)
        for one in waiting:
            with pytest.raises(EngineDead, match="put to sleep"):
                await asyncio.wait_for(one, 120)
        assert up(engine) == 0
        await engine.operations.wake()
        assert up(engine) == 1
        await served(engine)


async def test_a_light_sleep_that_was_cancelled_can_be_undone(options: dict[str, Any]) -> None:
    async with await started(options) as engine:
        pid = await stopped(engine)
        await cancelled(asyncio.create_task(engine.operations.sleep(1)))
        os.kill(pid, signal.SIGCONT)
        assert engine.operations.asleep == 1, "the engine takes the message still"
        with pytest.raises(Asleep):
            await engine.generate([65], GREEDY)
        assert "kv_bytes" in await engine.operations.sleep(1), "asked again"
        await engine.operations.wake()
        await served(engine)
        assert engine.engine_pid == pid


async def test_a_deep_sleep_that_was_cancelled_goes_on(options: dict[str, Any]) -> None:
    async with await started(options) as engine:
        pid = await stopped(engine)
        await cancelled(asyncio.create_task(engine.operations.sleep(2)))
        assert engine.operations.asleep == 2
        assert engine.health().reason == "asleep (level 2)"
        assert await engine.operations.sleep(2) == {}, "it was waited for"
        assert engine.engine_pid is None
        await until(lambda: not Path(f"/proc/{pid}").exists(), "the process is gone")
        await engine.operations.wake()
        assert engine.operations.asleep == 0
        await served(engine)


async def test_a_sleep_that_waits_for_requests_leaves_nothing(options: dict[str, Any]) -> None:
    async with await started(options) as engine:
        stream = engine.submit([65, CRAWL], SamplingParams(max_tokens=400))
        await cancelled(asyncio.create_task(engine.operations.sleep(1, "wait")))
        assert engine.operations.asleep == 0, "the engine was not asked"
        assert (await anext(stream)).token_ids
        stream.cancel()
        await served(engine)


async def test_the_process_refuses_while_its_pool_is_away(options: dict[str, Any]) -> None:
    async with await started(options) as engine:
        await engine.operations.sleep(1)
        engine.operations.asleep = 0  # As if this side were wrong.
        with pytest.raises(Overloaded, match="the engine sleeps") as caught:
            await engine.generate([65, 66], GREEDY)
        assert caught.value.retry_after == 5.0
        engine.operations.asleep = 1
        await engine.operations.wake()
        await served(engine)


async def test_a_close_in_the_midst_of_a_sleep(options: dict[str, Any]) -> None:
    engine = await started(options)
    await stopped(engine)
    sleeping = asyncio.create_task(engine.operations.sleep(2))
    await asyncio.sleep(0.1)
    await engine.close()
    assert await asyncio.wait_for(sleeping, 120) == {}
    assert engine.engine_pid is None


async def test_a_worker_that_dies_on_waking_is_replaced(options: dict[str, Any]) -> None:
    own = {**options, "executor": "multiproc"}
    async with await started(own, "engine_fakes:load_dying") as engine:
        await engine.operations.sleep(1)
        with pytest.raises(EngineDead, match="worker process exited with code 9"):
            await engine.operations.wake()
        await until(lambda: engine.health().ready, "replaced")
        assert engine.health().restarts == 1
        assert engine.operations.asleep == 0
        await served(engine)


async def test_a_process_that_must_be_killed_is_gone_when_sleep_returns(
    options: dict[str, Any],
) -> None:
    async with await started(options) as engine:
        pid = await stopped(engine)
        await engine.operations.sleep(2)
        assert not Path(f"/proc/{pid}").exists()


async def test_waking_up_is_no_restart(options: dict[str, Any]) -> None:
    """Neither before a death nor after one; and what was counted before the sleep stays."""
    async with await started(options) as engine:

        def counted(name: str) -> float:
            labels = {"model_name": engine.model_name, "engine": "0"}
            return engine.registry.get_sample_value(name, labels) or 0.0

        async def slept() -> None:
            before = counted("vllm:prefix_cache_queries_total")
            await engine.operations.sleep(2)
            await engine.operations.wake()
            await served(engine)
            assert counted("vllm:prefix_cache_queries_total") > before > 0

        await served(engine)
        await slept()
        assert counted("headrace:engine_restarts_total") == 0
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        await until(lambda: engine.health().restarts and engine.health().ready, "replaced")
        await served(engine)
        assert counted("headrace:engine_restarts_total") == 1
        await slept()
        assert counted("headrace:engine_restarts_total") == 1

"""Long-lived tasks: what ends one is counted and shown."""

from __future__ import annotations

import asyncio

import pytest

from headrace.base.errors import Overloaded
from headrace.obs.tasks import TaskWatch


async def test_a_kept_task_goes_on_after_what_it_raises() -> None:
    counted: list[str] = []
    watch = TaskWatch(counted.append)
    turns = 0

    async def work() -> None:
        nonlocal turns
        turns += 1
        if turns < 3:
            raise ValueError(f"turn {turns}")

    task = watch.keep("sweep", work, pause=0.01)
    while not watch.down:
        await asyncio.sleep(0)
    assert watch.down == {"sweep": "ValueError: turn 1"}
    await task
    assert (turns, counted, dict(watch.failures), watch.down) == (
        3,
        ["sweep", "sweep"],
        {"sweep": 2},
        {},
    )


async def test_a_task_that_ends_once_stays_down(caplog: pytest.LogCaptureFixture) -> None:
    watch = TaskWatch()

    async def work() -> None:
        raise KeyError("lost")

    task = watch.once("ledger", work())
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert list(watch.down) == ["ledger"]
    assert "lost" in caplog.text

    async def well() -> None:
        pass

    await watch.once("ledger", well())
    assert not watch.down


async def test_a_cancelled_task_is_no_failure() -> None:
    watch = TaskWatch()
    task = watch.keep("sweep", asyncio.Event().wait)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert not watch.failures
    assert not watch.down


async def test_an_errand_that_fails_is_counted_and_nothing_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    watch = TaskWatch(told.append)

    async def fail(error: Exception) -> None:
        raise error

    async def answer() -> int:
        return 7

    assert await watch.errand("sums", answer()) == 7
    with pytest.raises(ZeroDivisionError):
        await watch.errand("sums", fail(ZeroDivisionError("x")))
    with pytest.raises(Overloaded):
        await watch.errand("sums", fail(Overloaded("full", retry_after=1.0)))
    await asyncio.sleep(0)
    assert told == ["sums"]
    assert watch.failures["sums"] == 1
    assert not watch.down
    assert caplog.text.count("the task sums ended by an error") == 1
    cancelled = watch.errand("sums", asyncio.sleep(60))
    cancelled.cancel()
    await asyncio.wait([cancelled])
    assert told == ["sums"]

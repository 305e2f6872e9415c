"""The oldest generation is collected while nobody waits, and only then."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from headrace.obs import collector


class Knot:
    def __init__(self) -> None:
        self.itself = self


def old_knot() -> weakref.ref[Knot]:
    """A cycle that nobody holds any more, in the oldest generation."""
    knot = Knot()
    gc.collect(1)
    gc.collect(1)
    return weakref.ref(knot)


async def test_garbage_goes_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LOOK", 0.001)
    before = gc.get_threshold()
    waiting = True
    task = asyncio.create_task(collector.collect_when_idle(lambda: waiting))
    await asyncio.sleep(0)
    gone = old_knot()
    held = [[number] for number in range(200_000)]  # The interpreter would have collected twice.
    await asyncio.sleep(0.02)
    assert gone() is not None
    waiting = False
    while gone() is not None:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert gc.get_threshold() == before
    assert len(held) == 200_000


async def test_it_is_not_put_off_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "LOOK", 0.001)
    monkeypatch.setattr(collector, "LONGEST", 0.01)
    task = asyncio.create_task(collector.collect_when_idle(lambda: True))
    gone = old_knot()
    while gone() is not None:
        await asyncio.sleep(0.001)
    task.cancel()

"""The client of the fault table: what it calls hung had its time, and had no answer in it."""

from __future__ import annotations

import asyncio
import time

import pytest
from fault_client import SLICES, awake

LIMIT = 0.06


async def stopped_for_longer_than_the_limit() -> None:
    time.sleep(2 * LIMIT)
    for _ in range(SLICES // 2):  # What it takes to read an answer that came meanwhile.
        await asyncio.sleep(0)


def test_who_was_stopped_has_not_waited() -> None:
    """A client and its server were paused for 86 s by a measurement beside them; it said: hung."""

    async def asked() -> str:
        async with awake(LIMIT):
            await stopped_for_longer_than_the_limit()
            return "answered"

    assert asyncio.run(asked()) == "answered"


def test_what_never_comes_has_hung() -> None:
    async def asked() -> None:
        async with awake(LIMIT):
            await stopped_for_longer_than_the_limit()
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(asked())

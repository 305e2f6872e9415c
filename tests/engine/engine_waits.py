"""Waits for what an engine in a process of its own does, and a clock that is set by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.hearing.engine import HearingEngine

Engine = AsyncEngine | HearingEngine


async def until(true: Callable[[], object], what: str = "", seconds: float = 0.0) -> None:
    """Wait for an event, which is due after so many seconds. The limit, three minutes more, only
    tells a wait from an end."""
    end = time.monotonic() + seconds + 180
    while not true():
        assert time.monotonic() < end, f"it never came true: {what}"
        await asyncio.sleep(0.01)


def age(engine: Engine, seconds: float = 1e6) -> None:
    """Make the silence of an engine process that says nothing any more so much longer.

    What it said before and nobody has read would end the silence: that is taken first.
    """
    channel = engine._supervisor._channel
    assert channel is not None
    channel.flush()
    channel.received_at -= seconds


async def stopped(engine: Engine) -> int:
    """Stop the engine process, which is asked to and then seen to do nothing more; its id."""
    pid = engine.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    state = Path(f"/proc/{pid}/stat")
    await until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "stopped")
    return pid

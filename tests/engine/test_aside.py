"""A group that starts in place of one that died stands aside until it is ready."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_fakes import FAKE, HOLD_START
from engine_waits import until

from headrace.engine.aside import NICE
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.supervision import Supervision

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has what it takes")


def group_nice(pid: int) -> int | None:
    """The nice value of the process's session, where Linux has such groups."""
    file = Path(f"/proc/{pid}/autogroup")
    return int(file.read_text().rpartition(" ")[2]) if file.exists() else None


def nices(pid: int) -> set[int]:
    """The nice values of all its threads."""
    return {
        os.getpriority(os.PRIO_PROCESS, int(thread.name))
        for thread in Path(f"/proc/{pid}/task").iterdir()
    }


async def test_a_restart_stands_aside_until_it_is_ready(
    options: dict[str, Any], supervision: Supervision, notes: Path
) -> None:
    many = {**options, "threads": 2, "layout": "TP2"}
    usual = {os.getpriority(os.PRIO_PROCESS, 0)}
    async with await AsyncEngine.start(worker=FAKE, supervision=supervision, **many) as engine:
        first = engine.engine_pid
        assert first is not None
        assert "--aside" not in psutil.Process(first).cmdline()
        (notes / HOLD_START).touch()
        os.kill(first, signal.SIGKILL)
        await until(
            lambda: (
                engine.engine_pid not in (None, first)
                and psutil.Process(engine.engine_pid).children()
            ),
            "the next process has its rank",
        )
        assert engine.engine_pid is not None
        (rank,) = psutil.Process(engine.engine_pid).children()
        both = engine.engine_pid, rank.pid
        assert "--aside" in psutil.Process(engine.engine_pid).cmdline()
        await until(lambda: all(group_nice(pid) in (NICE, None) for pid in both), "aside")
        (notes / HOLD_START).unlink()
        await until(lambda: engine.health().ready, "ready")
        await until(lambda: all(nices(pid) == usual for pid in both), "their threads are back")
        await until(lambda: all(group_nice(pid) in (0, None) for pid in both), "and their groups")

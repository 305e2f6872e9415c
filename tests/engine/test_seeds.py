"""Ranks that are forks of the engine's process: what they share, and that they end with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_fakes import CRAWL, FAKE, HANG, HUNG, OPTIONS
from engine_waits import until

from headrace.base.errors import EngineDead
from headrace.base.sampling import SamplingParams
from headrace.engine.clients.async_engine import AsyncEngine
from headrace.engine.clients.supervision import Supervision
from tiny import bytewise
from tiny.kept import Kept

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")
SHARED = 8 << 20
"""Bytes of imports that a rank has not for itself, at least: it was 18 MB."""


async def group(model: Path, cache: Path, **rules: float) -> AsyncEngine:
    return await AsyncEngine.start(
        supervision=Supervision(back_off=0.05, **rules),
        **{**OPTIONS, "model": str(model), "cache_dir": str(cache), "threads": 2, "layout": "TP2"},
    )


def shared_memory(pid: int) -> int:
    """Bytes that this process has written to, or was given, and has in common with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Shared_Dirty:"))


def wish(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


async def test_ranks_share_imports_and_end_with_their_engine(kept: Kept, tmp_path: Path) -> None:
    async with await group(kept(bytewise.make), tmp_path) as engine:
        wanted = (await engine.generate([65, 66], wish(12))).outputs[0].token_ids
        assert engine.engine_pid is not None
        (rank,) = psutil.Process(engine.engine_pid).children()
        assert shared_memory(rank.pid) > SHARED
        os.kill(engine.engine_pid, signal.SIGKILL)
        await until(lambda: not rank.is_running(), "the end of the other rank")
        await until(lambda: engine.health().ready and engine.health().restarts == 1, "ready")
        assert (await engine.generate([65, 66], wish(12))).outputs[0].token_ids == wanted


async def test_a_stopped_first_rank_is_ended(kept: Kept, tmp_path: Path) -> None:
    """Long before the limit for an engine that computes and says nothing; who waits for it, and
    has been told nothing, is answered by the next."""
    async with await group(kept(bytewise.make), tmp_path, silent=2.0, hang=120.0) as engine:
        wanted = (await engine.generate([65, 66], wish(12))).outputs[0].token_ids
        assert engine.engine_pid is not None
        begin = time.monotonic()
        os.kill(engine.engine_pid, signal.SIGSTOP)
        assert (await engine.generate([65, 66], wish(12))).outputs[0].token_ids == wanted
        assert time.monotonic() - begin < 60
        labels = {"model_name": engine.model_name, "engine": "0", "kind": "hang"}
        assert engine.registry.get_sample_value("headrace:failures_total", labels) == 1


async def test_a_rank_that_is_killed_is_told_before_the_step_ends(
    options: dict[str, Any], supervision: Supervision, notes: Path
) -> None:
    """The first rank is in a step that never ends, and so cannot say it: its clients hear it, and
    the next group serves."""
    async with await AsyncEngine.start(
        worker=FAKE, supervision=supervision, **{**options, "threads": 2, "layout": "TP2"}
    ) as engine:
        waiting = engine.submit([66, CRAWL], wish(400))
        await anext(waiting)
        culprit = asyncio.create_task(engine.generate([65, HANG], wish(5)))
        await until((notes / f"{HUNG}{engine.engine_pid}").exists, "the step hangs")
        assert engine.engine_pid is not None
        (rank,) = psutil.Process(engine.engine_pid).children()
        rank.kill()
        with pytest.raises(EngineDead, match="rank 1 of 2 was ended by SIGKILL"):
            async for _ in waiting:
                pass
        culprit.cancel()
        assert engine.last_dump is not None
        assert json.loads(engine.last_dump.read_text())["kind"] == "death"
        await until(lambda: engine.health().restarts >= 1, "a restart")


def test_a_fork_that_was_killed_is_replaced_by_a_program() -> None:
    said = """
import os, signal, socket, sys
from headrace.engine import seeds
assert seeds.grown("headrace.engine.ranks.worker_process", [], []) is None
seeds.sow(2)
first, second = seeds._waiting
first.kill()
assert first.wait(30) == -signal.SIGKILL
assert seeds.grown("headrace.engine.process", [], []) is None
assert seeds.grown("headrace.engine.ranks.worker_process", ["no folder"], []) is second
assert second.wait(60) == 2, "its arguments are refused"
assert seeds.grown("headrace.engine.ranks.worker_process", [], []) is None
"""
    done = subprocess.run(
        [sys.executable, "-c", said], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "required: --worker, folder" in done.stderr

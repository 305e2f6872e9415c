"""Memory on the path of a stream's frames, counted: a frame keeps nothing, takes its outputs once,
and finds its pages where the last one left them."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "programs"))
from small_programs import double

from headrace.engine.programs.engine import OpenStream, ProgramEngine
from headrace.programs import ProgramLimits
from headrace.sched.deadlines import AdmittedStream

WARM, FRAMES = 120, 600
SMALL = {"x": np.ones((1, 3, 8, 8), "f")}
LARGE = {"x": np.ones((1, 3, 1200, 1200), "f")}
"""17 MB, more than a region keeps after other runs."""


@asynccontextmanager
async def streaming(
    folder: Path, feed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[ProgramEngine, OpenStream]]:
    """A stream whose next frame is due whenever it comes."""
    monkeypatch.setattr(AdmittedStream, "released", lambda self, now: (now, now + 60.0))
    path = folder / "double.onnx"
    path.write_bytes(double(1, 3, "h", "w"))
    engine = await ProgramEngine.start({"double": path}, ProgramLimits(seconds=60.0), lanes=1)
    try:
        shapes = {name: value.shape for name, value in feed.items()}
        yield (
            engine,
            await engine.open_stream(engine.find("double"), shapes, period=100.0, deadline=100.0),
        )
    finally:
        await engine.close()


async def send(engine: ProgramEngine, stream: OpenStream, feed: Any, count: int) -> None:
    for _ in range(count):
        await engine.run(stream.program, feed, stream=stream.id)
    await asyncio.sleep(0)  # The loop's handle of this wake-up holds the last outputs.


async def traced(engine: ProgramEngine, stream: OpenStream, feed: Any) -> tuple[float, int]:
    """Bytes that a frame keeps in this process, and those that frames had at most at a time."""
    await send(engine, stream, feed, WARM)
    gc.collect()
    tracemalloc.start()
    try:
        await send(engine, stream, feed, WARM)  # What the tracing itself keeps.
        gc.collect()
        begun = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        await send(engine, stream, feed, FRAMES)
        gc.collect()
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (kept - begun) / FRAMES, peak - begun


def faults(pid: int) -> int:
    """Pages that a process was given so far."""
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[7])


async def test_a_frame_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with streaming(tmp_path, SMALL, monkeypatch) as (engine, stream):
        kept, _ = await traced(engine, stream, SMALL)
        # The loop keeps up to a hundred cancelled timers for a while.
        assert kept < 64, f"a frame keeps {kept:.1f} bytes"


async def test_what_a_frame_keeps_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure of the test above, where each frame's run is held."""
    async with streaming(tmp_path, SMALL, monkeypatch) as (engine, stream):
        ended, held = engine.executor._on_end, list[Any]()

        def hold(*run: Any) -> None:
            held.append(run)
            ended(*run)

        engine.executor._on_end = hold
        kept, _ = await traced(engine, stream, SMALL)
        assert kept > 200


async def test_a_frame_takes_its_outputs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "WARM", 2)
    monkeypatch.setattr(sys.modules[__name__], "FRAMES", 4)
    async with streaming(tmp_path, LARGE, monkeypatch) as (engine, stream):
        kept, peak = await traced(engine, stream, LARGE)
        size = LARGE["x"].nbytes
        assert kept < 4096
        assert size < peak < 1.1 * size


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
@pytest.mark.parametrize("feed", [SMALL, LARGE], ids=["small", "large"])
async def test_a_frame_takes_no_new_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feed: dict[str, Any]
) -> None:
    async with streaming(tmp_path, feed, monkeypatch) as (engine, stream):
        confined = stream.program.confined
        region, pid, count = confined._regions[0], confined.pid, 12 if feed is LARGE else FRAMES
        assert pid is not None
        await send(engine, stream, feed, WARM if feed is SMALL else 4)
        before, blocks = faults(pid), os.fstat(region.file).st_blocks
        await send(engine, stream, feed, count)
        taken = faults(pid) - before
        # A page is 4 KiB; one copy of the large frame alone would be 4,219 of them.
        assert taken < max(FRAMES / 4, 16 * count), f"{count} frames took {taken} pages"
        assert os.fstat(region.file).st_blocks == blocks
        if feed is LARGE:
            assert 512 * blocks > 2 * feed["x"].nbytes
            engine.close_stream(stream.id, "", stream.program)
            assert 512 * os.fstat(region.file).st_blocks < math.prod(feed["x"].shape)

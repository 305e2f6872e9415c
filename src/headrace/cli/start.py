"""Start of an engine from a command: download with a bar, then load, cancellable throughout."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..base.config import EngineOptions, ServerOptions
from ..base.several import ModelChoice
from ..engine.clients.async_engine import AsyncEngine
from ..engine.clients.group import EngineGroup
from ..engine.programs.files import program_files, program_licences
from ..loader.progress import ProgressLine


async def started(options: EngineOptions, *, quiet: bool = False) -> AsyncEngine:
    """Return the engine, ready. Missing files are fetched first, with bars on stderr."""
    with ProgressLine(sys.stderr, enabled=not quiet) as bars:
        # A cancelled start leaves the block: the bars then end the download, which is in a thread.
        return await AsyncEngine.start(options, progress=bars)


async def several(chosen: Sequence[ModelChoice]) -> EngineGroup:
    """Start several models, like `started`."""
    with ProgressLine(sys.stderr) as bars:
        return await EngineGroup.start(chosen, progress=bars)


async def running(options: EngineOptions, server: ServerOptions) -> Any:
    """Start foreign programs, like `started`."""
    # Local: it needs numpy and the extra `programs`.
    from ..engine.programs.engine import ProgramEngine, ProgramLimits

    limits = ProgramLimits(int(server.program_memory * 1e9), seconds=server.program_seconds)
    with ProgressLine(sys.stderr) as bars:
        files = await asyncio.to_thread(
            program_files,
            server.program_names,
            cache_dir=options.cache_dir,
            offline=options.offline,
            progress=bars,
        )
        licences = program_licences(server.program_names)
        return await ProgramEngine.start(
            files, limits, lanes=server.program_lanes, licences=licences
        )


@asynccontextmanager
async def engine_of(options: EngineOptions, *, quiet: bool = False) -> AsyncIterator[AsyncEngine]:
    """Yield the engine for the length of a block; it is closed also if the block is cancelled."""
    engine = await started(options, quiet=quiet)
    try:
        yield engine
    finally:
        closing = asyncio.ensure_future(engine.close(0.0))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

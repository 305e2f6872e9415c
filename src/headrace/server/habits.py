"""What a server does again and again beside its requests, none of it ever ending unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("headrace.server")

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0


def keep(
    name: str, habit: Callable[[], Awaitable[None]], failed: Callable[[str], None]
) -> asyncio.Task[None]:
    """A task that runs `habit` and begins it anew when it fails: logged, and counted as "habit"."""

    async def again() -> None:
        pause = FIRST_PAUSE
        while True:
            try:
                await habit()
                return
            except Exception:  # the border of what nobody awaits
                log.exception("a habit of the server failed", extra={"habit": name})
                failed("habit")
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    return asyncio.create_task(again(), name=name)

"""How many requests of batches may be in the engine: what people leave, and at least one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from ...base.errors import Overloaded

if TYPE_CHECKING:
    from ..service import Service

LOOK_SECONDS = 0.25
"""Time between two looks at how busy the engine is."""


class Courtesy:
    """The places of all batches of one server, taken in turn."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._freed = asyncio.Event()
        self.in_work = 0

    def room(self) -> int:
        """Requests that may be in work now.

        A quarter of the engine's rows stays free for who comes next. While somebody waits in the
        engine's queue, or people hold all the rest, there is one: a batch goes on, slowly.
        """
        try:
            engine = self._service.engine
        except Overloaded:
            return 0
        if self._service.draining or not engine.health().ready:
            return 0
        rows = engine.options.max_sequences
        if engine.stats.waiting:
            return 1
        return max(1, rows - -(-rows // 4) - self._service.in_work)

    async def ready(self) -> None:
        """Wait until the engine serves."""
        while not self.room():
            await asyncio.sleep(LOOK_SECONDS)

    async def enter(self) -> bool:
        """Take a place if one comes free soon; False: look again whether it is still wanted."""
        if self.in_work >= self.room():
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._freed.wait()
            if self.in_work >= self.room():
                return False
        self.in_work += 1
        return True

    def leave(self) -> None:
        self.in_work -= 1
        self._freed.set()

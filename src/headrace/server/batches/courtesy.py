"""How many rows of the engine batches may hold: what people leave, and at least one."""

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
        self._first: object | None = None
        """The waiter that goes next: else one that needs many rows would wait for ever."""
        self.in_work = 0
        """Rows that are taken."""

    def room(self) -> int:
        """Rows that may be taken now.

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

    async def enter(self, who: object, rows: int) -> bool:
        """Take so many rows if they come free soon; False: look again whether they are wanted.

        More rows than there is room go alone. `who` may have become the next in line: it comes
        again, or calls `give_up`.
        """
        if not self._fits(who, rows):
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._freed.wait()
            if not self._fits(who, rows):
                return False
        self.in_work += rows
        self.give_up(who)
        return True

    def _fits(self, who: object, rows: int) -> bool:
        if self._first is not None and self._first is not who:
            return False
        room = self.room()
        if self.in_work + rows <= room or (room and not self.in_work):
            return True
        self._first = who
        return False

    def give_up(self, who: object) -> None:
        """It waits no longer."""
        if self._first is who:
            self._first = None
            self._freed.set()

    def leave(self, rows: int) -> None:
        self.in_work -= rows
        self._freed.set()

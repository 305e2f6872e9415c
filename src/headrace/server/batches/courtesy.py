"""Limit on the engine rows that batches may hold: those that interactive requests leave, at least
one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from ...base.errors import Overloaded

if TYPE_CHECKING:
    from ..service import Service

LOOK_SECONDS = 0.25
"""Seconds between two checks of the engine's load."""


class Courtesy:
    """Background-job throttle: the rows of all batches of one server, granted in turn."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._freed = asyncio.Event()
        self._first: object | None = None
        """Waiter that is served next; without it, a waiter for many rows would starve."""
        self.in_work = 0
        """Rows in use."""

    def room(self) -> int:
        """Return the number of rows that batches may hold now.

        A quarter of the engine's rows stays free for new interactive requests. If requests wait in
        the engine's queue, or hold all the rest, the number is one: a batch still makes slow
        progress.
        """
        try:
            engine = self._service.engine
        except Overloaded:
            return 0
        if self._service.draining or not engine.health().ready:
            return 0
        rows = engine.rows
        if engine.stats.waiting:
            return 1
        return max(1, rows - -(-rows // 4) - self._service.in_work)

    async def ready(self) -> None:
        """Wait until the engine serves requests."""
        while not self.room():
            await asyncio.sleep(LOOK_SECONDS)

    async def enter(self, waiter: object, rows: int) -> bool:
        """Take `rows` rows if they become free soon; on False, check whether they are still wanted.

        A request for more rows than there are runs alone. `waiter` may have become the next in
        line: it must call again, or call `give_up`.
        """
        if not self._fits(waiter, rows):
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._freed.wait()
            if not self._fits(waiter, rows):
                return False
        self.in_work += rows
        self.give_up(waiter)
        return True

    def _fits(self, waiter: object, rows: int) -> bool:
        if self._first is not None and self._first is not waiter:
            return False
        room = self.room()
        if self.in_work + rows <= room or (room and not self.in_work):
            return True
        self._first = waiter
        return False

    def give_up(self, waiter: object) -> None:
        """Withdraw a waiter."""
        if self._first is waiter:
            self._first = None
            self._freed.set()

    def leave(self, rows: int) -> None:
        self.in_work -= rows
        self._freed.set()

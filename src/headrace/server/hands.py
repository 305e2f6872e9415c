"""Thread pool for work that would block the event loop; clients take turns.

Work whose duration depends on a client's input (checking the parse cost of messages, serialising
them, tokenising, checking a grammar) runs here. A few threads do it, and owners take turns: a
thousand long texts of one key delay another key's request by one text. Work for large bodies never
occupies all threads, so small work never waits for large work of any owner (ADR 0052). Work for a
client that left is not begun.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ..base.errors import Overloaded
from ..base.weight import LIGHT
from .caller import BODY_SIZE, CALLER, RECEIVE
from .connection import while_connected

Result = TypeVar("Result")

MOST_WAITING = 1024
"""Jobs that wait for a thread, over all owners."""
MOST_OF_ONE = 256
"""Waiting jobs of one owner."""
LARGE = 16 * 1024
"""Bytes of a body from which its work counts as large."""


class Hands:
    """Thread pool for one event loop, which makes every call of this class."""

    def __init__(
        self,
        threads: int | None = None,
        *,
        most_waiting: int = MOST_WAITING,
        most_of_one: int = MOST_OF_ONE,
    ) -> None:
        """Create the pool.

        Of three or more `threads`, two never do large work. One stays free for small work; one
        leaves a processor core to the event loop and the engine.
        """
        self._free = threads or max(2, min(4, os.cpu_count() or 2)) + 1
        self._threads = ThreadPoolExecutor(self._free, "headrace-hands")
        self._small, self._large = _Turns(), _Turns()
        self._free_for_large = max(1, self._free - 2)
        self._most_waiting, self._most_of_one = most_waiting, most_of_one

    @property
    def waiting(self) -> int:
        return len(self._small) + len(self._large)

    async def run(
        self,
        work: Callable[..., Result],
        *arguments: Any,
        large: bool | None = None,
        **named: Any,
    ) -> Result:
        """Run `work(*arguments)` in a thread and return its result. `large`: whether it is large
        work; None: decide by the size of the body.

        Raises its errors, and `Overloaded` if too much waits. If the client leaves
        (`ClientDisconnect`), or the task is cancelled, it is not begun; if already begun, its
        result is dropped.
        """
        if large is None:
            large = BODY_SIZE.get() >= LARGE
        return await self._turn(partial(work, *arguments, **named), large)

    async def stoppable(
        self, work: Callable[[], Result], stop: Callable[[], None], *, large: bool
    ) -> Result:
        """Run work that `stop` can end from another thread.

        If its caller leaves, the work is stopped, and this returns when it has ended, so that its
        resources may be released.
        """
        return await self._turn(work, large, stop)

    async def _turn(
        self, work: Callable[[], Result], large: bool, stop: Callable[[], None] | None = None
    ) -> Result:
        owner = CALLER.get().owner
        turns = self._large if large else self._small
        if self.waiting >= self._most_waiting or turns.of(owner) >= self._most_of_one:
            raise Overloaded("too much work waits to be prepared", retry_after=1.0)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        over: asyncio.Future[None] | None = None

        def begin() -> None:
            nonlocal over
            if done.cancelled():
                return
            self._free -= 1
            self._free_for_large -= large
            over = loop.create_future()
            job = self._threads.submit(work)
            job.add_done_callback(
                lambda job: loop.call_soon_threadsafe(self._ended, job, done, over, large)
            )

        turns.put(owner, begin)
        self._next()
        receive = RECEIVE.get()
        try:
            if receive is None:
                return await done
            return await while_connected(receive, _result(done))
        finally:
            if stop is not None and over is not None and not over.done():
                stop()
                await asyncio.wait({over})

    async def beside(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run the work with `run` if the body is not light; otherwise run it directly."""
        if BODY_SIZE.get() <= LIGHT:
            return work(*arguments)
        return await self.run(work, *arguments)

    def _ended(
        self, job: Any, done: asyncio.Future[Any], over: asyncio.Future[None], large: bool
    ) -> None:
        self._free += 1
        self._free_for_large += large
        over.set_result(None)
        if not done.cancelled():
            fault = job.exception()
            if fault is not None:
                done.set_exception(fault)
            else:
                done.set_result(job.result())
        self._next()

    def _next(self) -> None:
        """Begin waiting work while there are free threads."""
        while self._free and (begin := self._small.take()):
            begin()
        while self._free and self._free_for_large and (begin := self._large.take()):
            begin()

    def close(self) -> None:
        """End the threads once their current work is done."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Turns:
    """Waiting work by owner; owners take turns."""

    def __init__(self) -> None:
        self._by_owner: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, owner: str) -> int:
        return len(self._by_owner.get(owner, ()))

    def put(self, owner: str, begin: Callable[[], None]) -> None:
        self._by_owner.setdefault(owner, deque()).append(begin)
        self._count += 1

    def take(self) -> Callable[[], None] | None:
        if not self._by_owner:
            return None
        owner, mine = self._by_owner.popitem(last=False)
        begin = mine.popleft()
        self._count -= 1
        if mine:
            self._by_owner[owner] = mine  # Back to the end of the queue.
        return begin


async def _result(done: asyncio.Future[Result]) -> Result:
    return await done

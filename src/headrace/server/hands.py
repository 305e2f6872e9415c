"""Work that would hold the event loop, done beside it: in threads, in turn, for who still waits.

Whatever takes time by what a client sent (weighing and writing out its messages, tokenising,
checking a grammar) runs here. A few threads do it, and owners take turns: a thousand long texts of
one key delay another's by one. Work for large bodies is never in all threads at once, so what is
small waits for nothing large, of whichever owner (ADR 0052). What nobody waits for any more is not
begun.
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
"""Jobs of all owners that wait for a thread."""
MOST_OF_ONE = 256
"""Waiting jobs of one owner."""
LARGE = 16 * 1024
"""Bytes of a body from which what is done for it is large."""


class Hands:
    """Threads for one event loop, which makes every call of this class."""

    def __init__(
        self,
        threads: int | None = None,
        *,
        most_waiting: int = MOST_WAITING,
        most_of_one: int = MOST_OF_ONE,
    ) -> None:
        """`threads`: of which two do nothing large, where there are three or more: one for what
        is small, and the processor's core that the event loop and the engine want meanwhile."""
        self._free = threads or max(2, min(4, os.cpu_count() or 2)) + 1
        self._threads = ThreadPoolExecutor(self._free, "headrace-hands")
        self._small, self._large = _Turns(), _Turns()
        self._free_for_large = max(1, self._free - 2)
        self._most_waiting, self._most_of_one = most_waiting, most_of_one

    @property
    def waiting(self) -> int:
        return len(self._small) + len(self._large)

    async def run(self, work: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """`work(*arguments)` in a thread; raises what it raises, and `Overloaded` where too much
        waits. Where the client leaves (`ClientDisconnect`), or the task is cancelled, it is not
        begun any more; once begun its result is dropped."""
        return await self._turn(partial(work, *arguments, **named), BODY_SIZE.get() >= LARGE)

    async def stoppable(
        self, work: Callable[[], Result], stop: Callable[[], None], *, large: bool
    ) -> Result:
        """Run what `stop` ends from another thread. Where nobody waits for it any more it is
        stopped, and this returns when it has ended: what it uses may be let go of then."""
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
        """`run` for a body that is not light, else work here and now."""
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
        """Begin what somebody waits for and there is a thread for."""
        while self._free and (begin := self._small.take()):
            begin()
        while self._free and self._free_for_large and (begin := self._large.take()):
            begin()

    def close(self) -> None:
        """End the threads when they have done what they do."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Turns:
    """What waits, by owner: each in turn has the next."""

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
            self._by_owner[owner] = mine  # Behind the others.
        return begin


async def _result(done: asyncio.Future[Result]) -> Result:
    return await done

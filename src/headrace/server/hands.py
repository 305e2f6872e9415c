"""Work that would hold the event loop, done beside it: in threads, in turn, for who still waits.

Whatever takes time by what a client sent (weighing and writing out its messages, tokenising,
checking a grammar) runs here. A few threads do it, and owners take turns: a thousand long texts of
one key delay another's by one. What nobody waits for any more is not begun.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ..base.errors import Overloaded
from .caller import CALLER, RECEIVE
from .connection import while_connected

Result = TypeVar("Result")

MOST_WAITING = 1024
"""Jobs of all owners that wait for a thread."""
MOST_OF_ONE = 256
"""Of one owner."""


class Hands:
    """Threads for one event loop, which makes every call of this class."""

    def __init__(self, threads: int | None = None) -> None:
        self._free = threads or max(2, min(4, os.cpu_count() or 2))
        self._threads = ThreadPoolExecutor(self._free, "headrace-hands")
        self._turns: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()
        """What waits, by owner; the first is next."""
        self._waiting = 0

    @property
    def waiting(self) -> int:
        return self._waiting

    async def run(self, work: Callable[..., Result], *arguments: Any, **named: Any) -> Result:
        """`work(*arguments)` in a thread; raises what it raises, and `Overloaded` where too much
        waits. Where the client leaves (`ClientDisconnect`), or the task is cancelled, it is not
        begun any more; once begun its result is dropped."""
        owner = CALLER.get().owner
        mine = self._turns.get(owner)
        if self._waiting >= MOST_WAITING or (mine is not None and len(mine) >= MOST_OF_ONE):
            raise Overloaded("too much work waits to be prepared", retry_after=1.0)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def begin() -> None:
            if done.cancelled():
                return
            self._free -= 1
            job = self._threads.submit(work, *arguments, **named)
            job.add_done_callback(lambda job: loop.call_soon_threadsafe(self._ended, job, done))

        if self._free:
            begin()
        else:
            if mine is None:
                mine = self._turns[owner] = deque()
            mine.append(begin)
            self._waiting += 1
        receive = RECEIVE.get()
        if receive is None:
            return await done
        return await while_connected(receive, _result(done))

    def _ended(self, job: Any, done: asyncio.Future[Any]) -> None:
        self._free += 1
        if not done.cancelled():
            fault = job.exception()
            if fault is not None:
                done.set_exception(fault)
            else:
                done.set_result(job.result())
        self._next()

    def _next(self) -> None:
        """Begin the next job that somebody waits for."""
        while self._free and self._turns:
            owner, mine = self._turns.popitem(last=False)
            begin = mine.popleft()
            self._waiting -= 1
            if mine:
                self._turns[owner] = mine  # Behind the others.
            begin()

    def close(self) -> None:
        """End the threads when they have done what they do."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _result(done: asyncio.Future[Result]) -> Result:
    return await done

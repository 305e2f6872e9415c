"""An operator's actions on a running engine, on the side of the event loop.

Asleep at level 1, the engine process has released its KV pool. At level 2 there is no engine
process, and waking is a start with open files, and weights perhaps still in the page cache. At both
levels requests are refused, with a time for a retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from ...base import environment
from ...base.errors import EngineDead, HeadraceError, Overloaded
from ...obs.tasks import TaskWatch
from .. import messages
from .supervision import State
from .supervisor import Supervisor

log = logging.getLogger("headrace.engine")
TRIES = 100
"""Number of 50 ms waits of a sleep for the last turn of the loop."""
KEPT_PROFILES = 20
"""Number of timelines kept; the oldest are deleted first."""

Mode = Literal["abort", "wait"]


class Asleep(Overloaded):
    """The engine sleeps until an operator wakes it."""

    code = "asleep"


class Profile(NamedTuple):
    """A recording of the engine's steps."""

    path: Path
    """The timeline, for ui.perfetto.dev."""
    steps: int
    """Number of steps in it."""
    left_out: int
    """Later steps that did not fit in the recording."""


class Work(Protocol):
    """The part of `in_work.RequestsInWork` that is used here."""

    async def until_idle(self) -> None: ...
    def abort_all(self) -> None: ...


class Operations:
    """Belongs to one event loop; imports no torch. Only one sleep or wake runs at a time."""

    def __init__(
        self,
        supervisor: Supervisor,
        work: Work,
        on_end: Callable[[EngineDead], None],
        tasks: TaskWatch,
    ) -> None:
        """`on_end`: called when the engine process was ended, to end all that waits for it."""
        self.asleep = 0
        """Level of sleep; 0: awake."""
        self._supervisor = supervisor
        self._work = work
        self._on_end = on_end
        self._tasks = tasks
        self._ending: asyncio.Task[None] | None = None
        """The latest end of the engine process; it goes on even if its caller has left."""
        self._asked: dict[int, asyncio.Future[dict[str, float]]] = {}
        self._number = 0
        self._turn = asyncio.Lock()

    def check_awake(self) -> None:
        """Raise `Asleep` unless requests are served."""
        if self.asleep:
            raise Asleep(
                f"the engine sleeps (level {self.asleep}); an operator can wake it",
                retry_after=messages.ASLEEP_RETRY,
            )

    async def reset_prefix_cache(self) -> dict[str, float]:
        """Forget all prefixes, of running requests too. Returns `blocks`, the number that was
        kept."""
        self.check_awake()
        return await self._ask("reset_prefix_cache")

    async def sleep(self, level: int, mode: Mode = "abort") -> dict[str, float]:
        """Free memory; requests in work are aborted ("abort") or finished first ("wait").

        Level 1: the KV pool, and with it the prefixes. Level 2: everything, the process too.
        Returns `kv_bytes` at level 1. Raises `EngineDead` if there is no engine. If cancelled after
        the engine was asked, the engine may be asleep until `wake`.
        """
        async with self._turn:
            await self._ended()
            if self._supervisor.state is State.ASLEEP:
                return {}
            before, self.asleep = self.asleep, max(self.asleep, level)
            try:
                if mode == "abort":
                    self._work.abort_all()
                await self._work.until_idle()
            except BaseException:
                self.asleep = before
                raise
            try:
                if level == 1:
                    return await self._when_idle("sleep")
                self._ending = self._tasks.errand("sleep", self._end())
                await asyncio.shield(self._ending)
                return {}
            except HeadraceError:
                self.asleep = before
                raise

    async def _end(self) -> None:
        await self._supervisor.sleep()
        self._on_end(EngineDead("the engine was put to sleep", retry_after=messages.ASLEEP_RETRY))

    async def _ended(self) -> None:
        """Wait for an end whose caller has left; its error belonged to that caller."""
        if self._ending is not None:
            await asyncio.wait([self._ending])

    async def wake(self) -> None:
        """Serve again; returns when requests are served. Raises `EngineDead` if that fails."""
        async with self._turn:
            await self._ended()
            if self.asleep == 1:
                await self._ask("wake")
            elif self.asleep == 2:
                self._supervisor.wake()
                while self._supervisor.state is not State.READY:
                    if not self._supervisor.alive:
                        raise self._supervisor.dead()
                    await asyncio.sleep(0.02)
            self.asleep = 0

    async def start_profile(self) -> None:
        """Record the steps from now on. Raises `InvalidRequest` if that is done already, or cannot
        be."""
        self.check_awake()
        await self._ask("start_profile")

    async def stop_profile(self) -> Profile:
        """Write the timeline of the recording. Raises `InvalidRequest` without one."""
        folder = environment.cache_root() / "profiles"
        path = folder / f"timeline-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9}.json"
        facts = await self._ask("stop_profile", str(path))
        if facts["left_out"]:
            log.warning("%s lacks the last %d steps: it was full", path, facts["left_out"])
        await asyncio.to_thread(_forget_old, folder)
        return Profile(path, int(facts["steps"]), int(facts["left_out"]))

    async def _when_idle(self, action: str) -> dict[str, float]:
        """Ask again while busy: the last request ends here a moment before it ends there."""
        for _ in range(TRIES):
            try:
                return await self._ask(action)
            except EngineDead:
                raise
            except Overloaded:
                await asyncio.sleep(0.05)
        return await self._ask(action)

    async def _ask(self, action: str, argument: str = "") -> dict[str, float]:
        self._number += 1
        waiting: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()
        self._supervisor.send(messages.Operate(self._number, action, argument))
        self._asked[self._number] = waiting
        return await waiting

    def done(self, answer: messages.Operated) -> None:
        """Take an answer of the engine process."""
        waiting = self._asked.pop(answer.number, None)
        if waiting is None or waiting.done():
            return
        if answer.error is None:
            waiting.set_result(answer.facts)
        else:
            waiting.set_exception(answer.error.error())

    def ready(self) -> None:
        """Note a new engine process, which is awake even if the one before was not."""
        self.asleep = 0

    def fail(self, error: HeadraceError) -> None:
        """End all open questions: the engine process is gone and answers no more."""
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._asked.clear()


def _forget_old(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for path in sorted(folder.glob("timeline-*.json"))[:-KEPT_PROFILES]:
            path.unlink()

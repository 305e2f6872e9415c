"""The tasks of an event loop; none ends unnoticed.

An `asyncio.Task` whose exception is not awaited is silent until it is collected. Every task that
outlives the function which starts it is started here. An end by an error is logged with its stack
and counted under its name. A probe reports a permanent task as long as it is down and nothing runs
in its place. (A function that awaits its own futures to their end may make them with
`asyncio.ensure_future`; `tests/test_architecture.py` checks both rules.)
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from ..base.errors import HeadraceError

log = logging.getLogger("headrace.tasks")
Result = TypeVar("Result")
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0


def ended(*down: Mapping[str, str]) -> str:
    """Describe the tasks and threads that do not run, with the reasons; empty if all run."""
    return "; ".join(f"{name} does not run: {why}" for one in down for name, why in one.items())


class TaskWatch:
    """The tasks of one owner (an engine, a service), which shows `down` in its health."""

    def __init__(self, on_failure: Callable[[str], None] = lambda name: None) -> None:
        """Call `on_failure` in the event loop with the name of a failed task, for counting."""
        self.failures: Counter[str] = Counter()
        """Ends by an exception, by the name of the task."""
        self.down: dict[str, str] = {}
        """Tasks that should run but do not: name → error that ended them."""
        self._on_failure = on_failure

    def keep(
        self, name: str, work: Callable[[], Awaitable[None]], *, pause: float = FIRST_PAUSE
    ) -> asyncio.Task[None]:
        """Run `work()`, again after a pause whenever it raises, until it returns.

        The pause doubles up to `LONGEST_PAUSE`, and starts over after a run longer than that.
        Meanwhile the task is `down`. Cancel the task to end it.
        """
        return self.once(name, self._kept(name, work, pause))

    def once(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`; if it raises, the task stays `down`. Cancel the task to end it."""
        self.down.pop(name, None)
        task = asyncio.get_running_loop().create_task(work, name=f"headrace-{name}")
        task.add_done_callback(lambda done: self._ended(name, done))
        return task

    def errand(self, name: str, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work`, which ends by itself.

        An error in it is counted, but the task is not `down`. A `HeadraceError` is the caller's
        answer and not counted.
        """
        task = asyncio.get_running_loop().create_task(work, name=f"headrace-{name}")
        task.add_done_callback(lambda done: self._done(name, done))
        return task

    async def _kept(self, name: str, work: Callable[[], Awaitable[None]], pause: float) -> None:
        loop, wait = asyncio.get_running_loop(), pause
        while True:
            begun = loop.time()
            try:
                await work()
                return
            except Exception as fault:  # noqa: BLE001 - the task goes on after any error
                self.note(name, fault)
            if loop.time() - begun > LONGEST_PAUSE:
                wait = pause
            await asyncio.sleep(wait)
            wait = min(LONGEST_PAUSE, 2 * wait)
            del self.down[name]

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.note(name, fault)

    def _done(self, name: str, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or (fault := task.exception()) is None:
            return
        if not isinstance(fault, HeadraceError):
            self._count(name, fault)

    def note(self, name: str, fault: BaseException) -> None:
        """Log and count the end of a task, which is `down` from now on."""
        self.down[name] = f"{type(fault).__name__}: {fault}"
        self._count(name, fault)

    def _count(self, name: str, fault: BaseException) -> None:
        self.failures[name] += 1
        log.error("the task %s ended by an error", name, exc_info=fault)
        self._on_failure(name)

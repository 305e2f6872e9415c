"""The tasks of an event loop, none of which ends unseen.

An `asyncio.Task` whose exception nobody awaits is silent until it is collected. Every task that
outlives the function which starts it is started here: an end by an error is logged with its stack
and counted under its name, and of those that are to run for ever a probe shows it for as long as
nothing runs in their place. (A function that awaits its own futures to their end may make them with
`asyncio.ensure_future`; `tests/test_architecture.py` holds both.)
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
    """Say which tasks and threads do not run, and why not; nothing where all run."""
    return "; ".join(f"{name} does not run: {why}" for one in down for name, why in one.items())


class TaskWatch:
    """The tasks of one owner (an engine, a service), who shows `down` in its health."""

    def __init__(self, on_failure: Callable[[str], None] = lambda name: None) -> None:
        """`on_failure`: counts, by the name of the task; called in the event loop."""
        self.failures: Counter[str] = Counter()
        """Ends by an exception, by the name of the task."""
        self.down: dict[str, str] = {}
        """Tasks that do not run and should: name → what ended them."""
        self._on_failure = on_failure

    def keep(
        self, name: str, work: Callable[[], Awaitable[None]], *, pause: float = FIRST_PAUSE
    ) -> asyncio.Task[None]:
        """Run `work()`, and again after a pause whenever it raises; done when it returns.

        The pause doubles up to `LONGEST_PAUSE`, and begins anew after a run that was longer than
        that. Meanwhile the task is `down`. Cancel the task to end it.
        """
        return self.once(name, self._kept(name, work, pause))

    def once(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`; where it raises, the task stays `down`. Cancel the task to end it."""
        self.down.pop(name, None)
        task = asyncio.get_running_loop().create_task(work, name=f"headrace-{name}")
        task.add_done_callback(lambda done: self._ended(name, done))
        return task

    def errand(self, name: str, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run `work`, which ends by itself. An error in it is counted, and nothing is `down`; a
        `HeadraceError` is the answer to whoever asked for it, and not even counted."""
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
            except Exception as fault:  # noqa: BLE001 - whatever it was, the task goes on
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

"""The threads of a process; none ends unnoticed.

Python prints the exception that ends a thread and goes on without it. Every thread that outlives
the function which starts it is started here: an error in it is logged with its stack and counted
under its name. A permanent thread is restarted after a pause. Meanwhile it is `down`, which a probe
shows. A message that fails is skipped, and later ones are served (`ThreadWatch.skipping`).
`tests/test_architecture.py` checks that no thread is started elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..base.errors import Undecodable
from .tasks import FIRST_PAUSE, LONGEST_PAUSE

log = logging.getLogger("headrace.threads")
QUIET_SECONDS = 1.0
"""Seconds after a logged error in which a thread's further errors are only counted, so that a bad
peer cannot fill the disk."""


class ThreadWatch:
    """The threads of one process; its methods may be called in any thread."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        """Errors by the name of the thread that met them."""
        self._down: dict[int, tuple[str, str]] = {}
        """By thread number: (name, error that ended it) of a thread that should run."""
        self._told: tuple[Counter[str], dict[str, str]] = Counter(), {}
        self._logged: dict[str, float] = {}
        self._lock = threading.Lock()

    @property
    def down(self) -> dict[str, str]:
        """Threads that should run but do not: name → error that ended them."""
        return dict(list(self._down.values()))

    def news(self) -> tuple[list[str], dict[str, str]] | None:
        """Return new failures' names and `down` threads; None if unchanged since the last call."""
        with self._lock:
            now = Counter(self.failures), self.down
            before, self._told = self._told, now
        if now == before:
            return None
        return [*(now[0] - before[0]).elements()], now[1]

    def keep(
        self, name: str, work: Callable[[], object], *, pause: float = FIRST_PAUSE
    ) -> threading.Thread:
        """Run `work()` in a daemon thread, again after a pause whenever it raises.

        It ends when `work` returns; the pause is that of `TaskWatch.keep`. Raises `RuntimeError` if
        the system refuses a thread.
        """
        return self._started(name, self._kept, name, work, pause)

    def errand(
        self, name: str, work: Callable[..., object], *given: Any
    ) -> threading.Thread | None:
        """Run `work(*given)`, which ends by itself, in a daemon thread; count an error in it.

        Returns None if the system refuses a thread, which is counted too.
        """
        try:
            return self._started(name, self._once, name, work, *given)
        except RuntimeError as full:
            self._note(name, full)
            return None

    @contextmanager
    def skipping(self, name: str) -> Iterator[None]:
        """Count and log an error in one message; continue with the next one."""
        try:
            yield
        except Exception as fault:  # noqa: BLE001 - whatever it was, others are served
            self._note(name, fault)

    def _started(self, name: str, run: Callable[..., None], *given: Any) -> threading.Thread:
        thread = threading.Thread(target=run, args=given, name=f"headrace-{name}", daemon=True)
        thread.start()
        return thread

    def _kept(self, name: str, work: Callable[[], object], pause: float) -> None:
        own, wait = threading.get_ident(), pause
        while True:
            begun = time.monotonic()
            try:
                work()
                return
            except Exception as fault:  # noqa: BLE001 - whatever it was, the thread goes on
                self._down[own] = name, f"{type(fault).__name__}: {fault}"
                self._note(name, fault)
            if time.monotonic() - begun > LONGEST_PAUSE:
                wait = pause
            time.sleep(wait)
            wait = min(LONGEST_PAUSE, 2 * wait)
            del self._down[own]

    def _once(self, name: str, work: Callable[..., object], *given: Any) -> None:
        with self.skipping(name):
            work(*given)

    def _note(self, name: str, fault: BaseException) -> None:
        now = time.monotonic()
        with self._lock:
            self.failures[name] += 1
            if now - self._logged.get(name, -QUIET_SECONDS) < QUIET_SECONDS:
                return
            self._logged[name] = now
        stack = None if isinstance(fault, Undecodable) else fault  # A peer's fault, not ours.
        log.error("the thread %s met an error: %s", name, fault, exc_info=stack)


THREADS = ThreadWatch()
"""All threads of this process."""

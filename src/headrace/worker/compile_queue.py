"""Compile jobs in threads, fair to their owners; a job that no caller waits for is dropped.

A running job cannot be stopped (it is foreign code). Three things keep a few large jobs from
holding up all others. One thread takes small jobs alone. A job that has run for `OVERDUE` seconds
gets a substitute thread. Of the waiting jobs, the one whose owner has used least goes first.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..obs.threads import THREADS

AT_FIRST = 2
MOST_THREADS = 6
"""Largest number of threads, with the substitutes for those in overdue jobs."""
OVERDUE = 2.0
SMALL = 16 * 1024
"""Characters of a source up to which the small jobs' thread takes it."""
LEASE = 2.0
"""Seconds after which a job that was not asked for again waits after all others."""
FORGET = 60.0
"""Seconds after which such a job is dropped."""
NICE = 10
"""Niceness of the large jobs' threads, added to the process's own (Linux: at most 19)."""


@dataclass(slots=True)
class _Job:
    source: str
    owner: str
    number: int
    asked: float
    future: Future[Any] = field(default_factory=Future)


class CompileQueue:
    """A queue that runs `compile_` for sources. May be called from any thread."""

    def __init__(
        self,
        compile_: Callable[[str], Any],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compile = compile_
        self._clock = clock
        self._changed = threading.Condition()
        self._waiting: dict[str, _Job] = {}
        self._spent: defaultdict[str, float] = defaultdict(float)
        """Seconds that each owner used since the queue was last empty."""
        self._running: dict[int, float] = {}
        """Start time of its job, by thread."""
        self._threads: list[threading.Thread] = []
        self._number = 0
        self._closed = False

    def submit(self, source: str, owner: str) -> Future[Any]:
        """Queue a source; return its future, cancelled after `FORGET` seconds without an `ask`."""
        with self._changed:
            self._number += 1
            job = _Job(source, owner, self._number, self._clock())
            self._waiting[source] = job
            self._more()
            self._changed.notify_all()
            return job.future

    def ask(self, source: str) -> None:
        """Note that a caller still waits for this source."""
        with self._changed:
            job = self._waiting.get(source)
            if job is not None:
                job.asked = self._clock()
            self._more()

    def close(self) -> None:
        """Begin no more jobs; do not wait for running ones."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for job in waiting.values():
            job.future.cancel()

    def _more(self) -> None:
        """Start the threads that are missing."""
        now = self._clock()
        overdue = sum(now - begun > OVERDUE for begun in self._running.values())
        missing = min(MOST_THREADS, AT_FIRST + overdue) - len(self._threads)
        for _ in range(missing if self._waiting else 0):
            self._start()

    def _start(self) -> None:
        number = len(self._threads)
        # A daemon: a thread in foreign code must not keep the process from ending.
        with contextlib.suppress(RuntimeError):  # No more threads here: retried later.
            self._threads.append(THREADS.keep("grammar", partial(self._work, number)))

    def _work(self, number: int) -> None:
        if number:
            _stand_back()
        while True:
            with self._changed:
                while (job := self._next(small=number == 0)) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                del self._waiting[job.source]
                begun = self._running[number] = self._clock()
            try:
                if job.future.set_running_or_notify_cancel():
                    try:
                        made = self._compile(job.source)
                    except BaseException as fault:  # noqa: BLE001 - handed to the waiting caller
                        job.future.set_exception(fault)
                    else:
                        job.future.set_result(made)
            finally:
                with self._changed:
                    del self._running[number]
                    self._spent[job.owner] += self._clock() - begun
                    if not self._waiting:
                        self._spent.clear()

    def _next(self, *, small: bool) -> _Job | None:
        """Return the job to begin now; drop those with no caller waiting."""
        now = self._clock()
        for job in [job for job in self._waiting.values() if now - job.asked > FORGET]:
            del self._waiting[job.source]
            job.future.cancel()
        fit = [job for job in self._waiting.values() if not small or len(job.source) <= SMALL]
        if self._closed or not fit:
            return None
        return min(
            fit,
            key=lambda job: (
                now - job.asked > LEASE,
                self._spent[job.owner],
                len(job.source),
                job.number,
            ),
        )


def _stand_back() -> None:
    """Give this thread a lower priority than everything else on the machine (Linux: each thread has
    its own priority). Compiling does not hold the interpreter lock, so nothing waits for it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + NICE))

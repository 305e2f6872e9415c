"""Jobs of compiling, in threads, fair to their owners; none is begun that nobody asks for.

A job that runs cannot be stopped (it is foreign code), so three things keep a few large ones from
holding up everybody: one thread takes small ones alone, a job that has run for `OVERDUE` seconds
gets another thread beside it, and of what waits the owner goes first that has used least.
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
"""With those that stand in for jobs that are overdue."""
OVERDUE = 2.0
SMALL = 16 * 1024
"""Characters of a source for which a thread is kept."""
LEASE = 2.0
"""Seconds after which a job that nobody asked for again waits behind all others."""
FORGET = 60.0
"""Seconds after which it is dropped."""
NICE = 10
"""Niceness of the threads that take large ones, beside that of who asks (Linux: at most 19)."""


@dataclass(slots=True)
class _Job:
    source: str
    owner: str
    number: int
    asked: float
    future: Future[Any] = field(default_factory=Future)


class CompileQueue:
    """Runs `compile_` for sources. May be called from any thread."""

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
        """Seconds of each owner since nothing waited last."""
        self._running: dict[int, float] = {}
        """Thread → when it began its job."""
        self._threads: list[threading.Thread] = []
        self._number = 0
        self._closed = False

    def submit(self, source: str, owner: str) -> Future[Any]:
        """The result to come; cancelled where nobody asked for it in `FORGET` seconds."""
        with self._changed:
            self._number += 1
            job = _Job(source, owner, self._number, self._clock())
            self._waiting[source] = job
            self._more()
            self._changed.notify_all()
            return job.future

    def ask(self, source: str) -> None:
        """Somebody still waits for it."""
        with self._changed:
            job = self._waiting.get(source)
            if job is not None:
                job.asked = self._clock()
            self._more()

    def close(self) -> None:
        """Begin nothing more; what runs is not waited for."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for job in waiting.values():
            job.future.cancel()

    def _more(self) -> None:
        """Start threads until there are as many as there should be."""
        now = self._clock()
        overdue = sum(now - begun > OVERDUE for begun in self._running.values())
        missing = min(MOST_THREADS, AT_FIRST + overdue) - len(self._threads)
        for _ in range(missing if self._waiting else 0):
            self._start()

    def _start(self) -> None:
        number = len(self._threads)
        # A daemon: one that is in foreign code must not keep the process from ending.
        with contextlib.suppress(RuntimeError):  # No more threads here: it is tried again.
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
                    except BaseException as fault:  # noqa: BLE001 - handed to who waits
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
        """The job to begin now; drops those that nobody wants."""
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
    """Let everything else on the machine go before this thread (Linux: a thread has a priority of
    its own). Compiling holds no interpreter, so nothing waits for it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, own + NICE))

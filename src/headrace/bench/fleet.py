"""Client processes: sessions are distributed among them, records come back as requests end."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..base.errors import HeadraceError
from ..base.foreign import any_json
from ..obs.threads import THREADS
from .job import Job, More
from .record import ClientAudit, RequestRecord
from .workload import Session

START_MARGIN = 0.3
"""Seconds between sending the start time and the start."""


def deal(whole: Job, processes: int) -> list[Job]:
    """Split a run's job into one per process: process p gets the sessions i with i mod P = p. The
    limit on requests in flight is split evenly."""
    count = len(whole.sessions)
    processes = min(processes, count, whole.concurrency or count, whole.most or count)

    def share(most: int | None, process: int) -> int | None:
        return None if most is None else most // processes + (process < most % processes)

    return [
        msgspec.structs.replace(
            whole,
            process=process,
            sessions=whole.sessions[process::processes],
            numbers=whole.numbers[process::processes],
            concurrency=share(whole.concurrency, process),
            offsets=None if whole.offsets is None else whole.offsets[process::processes],
            most=share(whole.most, process),
        )
        for process in range(processes)
    ]


class Supply:
    """Endless sessions for the processes, from one seed, independent of their number.

    A workload of 2 n sessions begins with the sessions of one of n, so that prefixes and lengths
    continue consistently.
    """

    def __init__(
        self, make: Callable[[int], Sequence[Session]], given: int, processes: int
    ) -> None:
        """Store `make`, where `make(n)` returns the first n sessions, and the number `given` out
        already."""
        self._make, self._given = make, given
        self._pending: list[More] = [More([], []) for _ in range(processes)]

    def more(self, process: int) -> More:
        """Return the next sessions of a process: those with a number congruent to it modulo P."""
        if not self._pending[process].sessions:
            processes, wanted = len(self._pending), 2 * self._given
            for number, session in enumerate(self._make(wanted)):
                if number >= self._given:
                    self._pending[number % processes].sessions.append(session)
                    self._pending[number % processes].numbers.append(number)
            self._given = wanted
        found, self._pending[process] = self._pending[process], More([], [])
        return found


class Fleet:
    """Runner of jobs in separate processes."""

    def __init__(self, jobs: Sequence[Job], supply: Supply | None = None) -> None:
        self.jobs = list(jobs)
        self._supply = supply
        self.audits: list[ClientAudit] = []
        self.start_ns = 0
        self._events: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()
        self._children: list[subprocess.Popen[bytes]] = []

    def run(
        self, on_record: Callable[[RequestRecord], None], on_tick: Callable[[], None] = lambda: None
    ) -> bool:
        """Start and wait for the end; return False if Ctrl-C ended it early. Records are kept."""
        try:
            return self._run(on_record, on_tick)
        except KeyboardInterrupt:
            return False
        finally:
            self._stop()

    def _run(self, on_record: Callable[[RequestRecord], None], on_tick: Callable[[], None]) -> bool:
        for job in self.jobs:
            self._start(job)
        open_, waiting = len(self.jobs), len(self.jobs)
        while open_:
            try:
                process, message = self._events.get(timeout=0.25)
            except queue.Empty:
                on_tick()
                continue
            if message is None:
                open_ -= 1
                code = self._children[process].wait()
                if code or waiting:
                    raise HeadraceError(f"a client process ended with exit code {code}")
            elif message["type"] == "ready":
                waiting -= 1
                if waiting == 0:
                    self._go()
            elif message["type"] == "record":
                on_record(msgspec.convert(message["value"], RequestRecord))
                on_tick()
            elif message["type"] == "more":
                assert self._supply is not None
                self._tell(process, msgspec.json.encode(self._supply.more(process)))
            elif message["type"] == "audit":
                self.audits.append(msgspec.convert(message["value"], ClientAudit))
            else:
                raise HeadraceError(f"a client process failed: {message['value']}")
        return True

    def stop(self) -> None:
        """Start nothing new; requests in flight end."""
        for process in range(len(self._children)):
            self._tell(process, msgspec.json.encode(More(stop=True)))

    def _start(self, job: Job) -> None:
        child = subprocess.Popen(
            [sys.executable, "-m", "headrace.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._children.append(child)
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(job) + b"\n")
        child.stdin.flush()
        THREADS.errand("load", self._read, job.process, child)

    def _read(self, process: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        try:
            for line in child.stdout:
                self._events.put((process, any_json(line)))
        finally:
            self._events.put((process, None))

    def _go(self) -> None:
        self.start_ns = time.monotonic_ns() + int(START_MARGIN * 1e9)
        for process in range(len(self._children)):
            self._tell(process, str(self.start_ns).encode())

    def _tell(self, process: int, line: bytes) -> None:
        pipe = self._children[process].stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # It has ended; its own message says why.
            pipe.write(line + b"\n")
            pipe.flush()

    def _stop(self) -> None:
        for child in self._children:
            if child.poll() is None:
                child.terminate()
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            if child.poll() is None:
                child.kill()
                child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

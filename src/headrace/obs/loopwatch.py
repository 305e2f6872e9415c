"""A watch over an event loop: its lateness, and the code that blocked it.

An event loop does one thing at a time; a long task delays every stream and probe of the process. A
beat in the loop measures the delay. A separate thread sees when the beat stays away and takes the
loop's stack during the hold. If C holds the interpreter as well, it takes the stack at the first
moment after, which is the line that called it. A loop that waited for a core was held by nobody.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .flight import write_dump
from .threads import THREADS

log = logging.getLogger("headrace.loop")

BEAT = 0.05
"""Seconds between two beats; shorter holds are seen if they meet one."""
NOTED = 0.25
"""Seconds of a hold from which it is logged and its stack kept as a flight record."""
UNREADY = 1.0
"""Seconds of a hold from which requests are sent elsewhere, for `REMEMBERED` seconds."""
REMEMBERED = 5.0
DUMP_EVERY = 60.0
STARVED = "no code: it waited for a core, since the machine is busy"


class LoopWatch:
    """Watch over the loop in which `start` is called."""

    def __init__(
        self, *, dumps: Path | None = None, on_beat: Callable[[float], None] = lambda late: None
    ) -> None:
        """Keep flight records in `dumps`; call `on_beat` with each beat's lateness in seconds."""
        self.longest = 0.0
        """Seconds of the longest hold since the start, or since the last reset to zero."""
        self.stack = ""
        """Stack of the latest noted hold."""
        self._dumps = dumps
        self._on_beat = on_beat
        self._due = 0.0
        self._long: tuple[float, float] = (-1e9, 0.0)
        """(when, seconds) of the latest hold that makes the loop unready."""
        self._dumped = -1e9
        self._seen = (0.0, "")
        """(due time of a beat, the loop's stack that the thread saw while it was overdue)."""
        self._waited = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._due, self._waited = time.monotonic() + BEAT, waited_for_core()
        self._timer = self._loop.call_later(BEAT, self._beat)
        THREADS.keep("loop-watch", self._watch)

    def stop(self) -> None:
        self._stop.set()
        if self._timer is not None:
            self._timer.cancel()

    @property
    def problem(self) -> str:
        """Reason why this loop should get no requests at the moment, or the empty string."""
        when, seconds = self._long
        if time.monotonic() - when > REMEMBERED:
            return ""
        return f"the event loop was held for {seconds:.1f} s"

    def _beat(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._due)
        self._on_beat(late)
        self.longest = max(self.longest, late)
        if late >= UNREADY:
            self._long = now, late
        was, self._waited = self._waited, waited_for_core()
        if late >= NOTED:
            self._note(now, late, starved=self._waited - was > late / 2)
        self._due = now + BEAT
        self._timer = self._loop.call_later(BEAT, self._beat)

    def _note(self, now: float, late: float, *, starved: bool) -> None:
        due, stack = self._seen
        self.stack = stack if due == self._due else ""
        lines = [line.strip() for line in self.stack.splitlines()]
        at = next((line for line in reversed(lines) if line.startswith("File ")), "unknown")
        at = STARVED if starved else at
        log.warning("the event loop was held", extra={"seconds": round(late, 3), "at": at})
        if self._dumps is not None and now - self._dumped >= DUMP_EVERY:
            self._dumped = now
            # In a separate thread: a slow disk would be another hold.
            write = partial(
                write_dump,
                self._dumps,
                kind="loop",
                reason=f"the event loop was held for {late:.3f} s",
                stacks=self.stack,
                steps=[],
                details={"seconds": late},
            )
            THREADS.errand("loop-dump", write)

    def _watch(self) -> None:
        while not self._stop.wait(max(BEAT, self._due + NOTED / 2 - time.monotonic())):
            due = self._due
            if self._seen[0] != due and time.monotonic() - due >= NOTED / 2:
                frame = sys._current_frames().get(self._thread)
                # Only code, no values: it contains no request's data.
                self._seen = due, "".join(traceback.format_stack(frame)) if frame else ""


def waited_for_core() -> float:
    """Return the seconds that this thread could have run and did not; 0 where Linux counts none."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

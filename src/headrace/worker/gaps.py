"""The gaps between steps, in which readers of blocks read.

A reader beside a step costs more than its own time: where it takes a core, the team's other threads
wait at their barrier until the system gives that core back. So readers read while no step runs, and
a step that begins lets them have a share of the time that the one before it took.
"""

from __future__ import annotations

import math
import threading
import time

SHARE = 0.04
"""Share of a step's time that readers have before the next, if there is something to read."""


class Gaps:
    """Used by the thread of the steps and by those that read."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs = False
        """Does a step run?"""
        self._began = self._until = -math.inf
        """`perf_counter` at the begin of the last step, and until when the next leaves the cores
        to readers."""
        self._wanted = 0
        """Orders of readers that have not ended."""

    def step_begins(self) -> None:
        """Wait until readers had their share, or need nothing."""
        with self._changed:
            left = self._until - time.perf_counter()
            if self._wanted and left > 0:
                self._changed.wait_for(lambda: not self._wanted, left)
            self._runs = True
            self._began = time.perf_counter()

    def step_ended(self) -> None:
        with self._changed:
            now = time.perf_counter()
            self._runs, self._until = False, now + SHARE * (now - self._began)
            self._changed.notify_all()

    def order_begins(self) -> None:
        with self._changed:
            self._wanted += 1

    def order_ended(self) -> None:
        with self._changed:
            self._wanted -= 1
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when a block may be read."""
        if self._runs:
            with self._changed:
                self._changed.wait_for(lambda: not self._runs)

"""Inter-step windows, in which readers of blocks read.

A reader that runs during a step costs more than its own time. If it takes a core, the other threads
of the pool wait at their barrier until the system gives that core back. So readers read while no
step runs. A step that begins first lets them have a share of the time of the step before it.
"""

from __future__ import annotations

import math
import threading
import time

SHARE = 0.04
"""Share of a step's time that readers get before the next step, if there is something to read."""


class Gaps:
    """Synchronisation of the steps' thread and the readers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs = False
        """Flag: a step runs."""
        self._began = self._until = -math.inf
        """Time (`perf_counter`) when the last step began; time until which the next leaves the
        cores to readers."""
        self._wanted = 0
        """Number of readers' orders that have not ended."""

    def step_begins(self) -> None:
        """Wait until readers had their share or need nothing."""
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

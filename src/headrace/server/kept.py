"""The parent of the API process: it holds the port, and begins that process again when it dies.

The parent computes nothing and takes no connection, so what kills the other (memory, a crash in a
library, an operator's `kill -9`) leaves it. Connections that come meanwhile wait in the port's
queue, which is the parent's too. The child is a fork: at that moment there is one thread and no
model, so it costs milliseconds and shares what was imported.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from ..engine.spawn import ORPHANED, PR_SET_PDEATHSIG, explain_exit

log = logging.getLogger("headrace.server")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEALTHY = 30.0
"""Seconds of life after which a death counts as the first again."""
GIVE_UP = 5
"""Deaths in a row after which the parent ends too: whoever runs it can act."""
BACK_OFF = 0.5
"""Pause after the second death in a row; doubles. The first is mended at once."""


def keep(serve: Callable[[], int]) -> int:
    """Run `serve` in a child until it returns; returns its exit status, in child and parent.

    Where a signal ended the child that was not sent to the parent first, another one follows.
    Call it from the main thread of a process that has no other yet.
    """
    child, stopping = 0, False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if child:
            os.kill(child, number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    deaths = 0
    while True:
        begun = time.monotonic()
        end, held = os.pipe()
        # A signal between the fork and the new handlers is the child's once it has those.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        child = os.fork()
        if child == 0:
            for number, handler in previous.items():
                signal.signal(number, handler)
            _follow(end, held)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            return serve()
        os.close(end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = _wait(child)
        child = 0
        os.close(held)
        if code >= 0 or stopping:
            return code if code >= 0 else 128 - code
        deaths = 1 if time.monotonic() - begun > HEALTHY else deaths + 1
        log.error("the API process %s (%d in a row)", explain_exit(code), deaths)
        if deaths >= GIVE_UP:
            return 128 - code
        if deaths > 1:
            time.sleep(BACK_OFF * 2 ** (deaths - 2))
        if stopping:
            return 128 - code


def _wait(child: int) -> int:
    """The end of the child; others are those that a container's first process inherits."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return os.waitstatus_to_exitcode(status)


def _follow(end: int, held: int) -> None:
    """In the child: leave with the parent, however it ends; leave Ctrl-C in the terminal to it."""
    os.close(held)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        os.read(end, 1)
        os._exit(ORPHANED)

    threading.Thread(target=wait, name="headrace-lifeline", daemon=True).start()

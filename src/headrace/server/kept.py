"""Parent of the API process: it holds the port, and restarts that process when it dies.

The parent computes nothing and accepts no connection, so it survives what kills the child: memory,
a crash in a library, an operator's `kill -9`. Meanwhile new connections wait in the port's queue,
which belongs to the parent too. The child is a fork, made while there is one thread and no model.
So it costs milliseconds and shares the imported modules. When the first child serves, the parent
imports the server's modules, so that the next child answers at once (ADR 0048).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from ..engine.spawn import ORPHANED, PR_SET_PDEATHSIG, explain_exit
from ..obs.threads import THREADS

log = logging.getLogger("headrace.server")
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HEALTHY = 30.0
"""Seconds of life after which a death counts as the first in a row."""
GIVE_UP = 5
"""Deaths in a row after which the parent ends too, so that its supervisor can act."""
BACK_OFF = 0.5
"""Seconds of pause after the second death in a row; doubles. After the first there is no pause."""
SETTLE = 2.0
"""Seconds that the first child serves before the parent imports: first requests have precedence."""
LOOK = 1.0
"""Seconds between two checks whether a child that does not serve yet is alive."""


class Life:
    """Information that a child has about itself and reports to its parent."""

    def __init__(self, restarts: int, news: int) -> None:
        """Create it. `news` is the write end of a pipe to the parent."""
        self.restarts = restarts
        """Number of children that died before it."""
        self._news = news

    def serves(self) -> None:
        """Report readiness: the parent may prepare for the next child."""
        with suppress(OSError):
            os.write(self._news, b"r")


def keep(serve: Callable[[Life], int], prepare: Callable[[], None]) -> int:
    """Run `serve` in a child until it returns; return its exit status, in child and parent.

    If the child is ended by a signal that was not sent through the parent, another child follows.
    `prepare` is called in the parent once the first child serves: later children inherit its
    imports. It must start no thread. Call this from the main thread of a process without other
    threads.
    """
    child, stopping = 0, False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True
        if child:
            os.kill(child, number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    deaths = restarts = 0
    prepared = False
    while True:
        begun = time.monotonic()
        end, held = os.pipe()
        reports, news = os.pipe()
        # A signal between the fork and the new handlers stays pending until the child has them.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        child = os.fork()
        if child == 0:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(reports)
            _follow(end, held)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            return serve(Life(restarts, news))
        os.close(end)
        os.close(news)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if not prepared and _serves(child, reports):
            _prepare(prepare)
            prepared = True
        code = _wait(child)
        child = 0
        os.close(held)
        os.close(reports)
        if code >= 0 or stopping:
            return code if code >= 0 else 128 - code
        restarts += 1
        deaths = 1 if time.monotonic() - begun > HEALTHY else deaths + 1
        log.error("the API process %s (%d in a row)", explain_exit(code), deaths)
        if deaths >= GIVE_UP:
            return 128 - code
        if deaths > 1:
            time.sleep(BACK_OFF * 2 ** (deaths - 2))
        if stopping:
            return 128 - code


def _wait(child: int) -> int:
    """Wait for the child's end. Other processes that end are orphans, which a container's first
    process adopts."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return os.waitstatus_to_exitcode(status)


def _serves(child: int, reports: int) -> bool:
    """Wait until the child has served for a moment; return False if it ends before."""
    since = 0.0
    while not since or time.monotonic() - since < SETTLE:
        if select.select([reports], [], [], LOOK)[0]:
            if not os.read(reports, 1):
                return False  # The pipe was closed: the child has ended.
            since = time.monotonic()
        # A process of the child's may still hold the pipe. The child stays waitable.
        elif os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
    return True


def _prepare(prepare: Callable[[], None]) -> None:
    try:
        prepare()
    except Exception:  # The parent goes on after any error; the child did not need this.
        log.exception("the parent could not prepare for another API process")
    gc.collect()
    gc.freeze()  # The garbage collector no longer touches these pages, so children share them.


def _follow(end: int, held: int) -> None:
    """Make the child end with its parent, however that ends; the parent handles Ctrl-C."""
    os.close(held)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        os.read(end, 1)
        os._exit(ORPHANED)

    THREADS.keep("lifeline", wait)

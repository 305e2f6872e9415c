"""The parent of the API process: it holds the port, and begins that process again when it dies.

The parent computes nothing and takes no connection, so what kills the other (memory, a crash in a
library, an operator's `kill -9`) leaves it. Connections that come meanwhile wait in the port's
queue, which is the parent's too. The child is a fork: at that moment there is one thread and no
model, so it costs milliseconds and shares what was imported. When the first child serves, the
parent imports what a server needs, so that the next one answers at once (ADR 0048).
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
"""Seconds of life after which a death counts as the first again."""
GIVE_UP = 5
"""Deaths in a row after which the parent ends too: whoever runs it can act."""
BACK_OFF = 0.5
"""Pause after the second death in a row; doubles. The first is mended at once."""
SETTLE = 2.0
"""Seconds that the first child serves before the parent imports: first requests go before."""
LOOK = 1.0
"""How often a child that does not serve yet is looked at, beside its own word."""


class Life:
    """What a child knows of itself, and tells its parent."""

    def __init__(self, restarts: int, news: int) -> None:
        """`news`: the writing end of a pipe to the parent."""
        self.restarts = restarts
        """How many children died before it."""
        self._news = news

    def serves(self) -> None:
        """It is ready: the parent may prepare for the next."""
        with suppress(OSError):
            os.write(self._news, b"r")


def keep(serve: Callable[[Life], int], prepare: Callable[[], None]) -> int:
    """Run `serve` in a child until it returns; returns its exit status, in child and parent.

    Where a signal ended the child that was not sent to the parent first, another one follows.
    `prepare` is called in the parent once the first child serves: what it imports the next need
    not; it must start no thread. Call this from the main thread of a process that has no other.
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
        told, news = os.pipe()
        # A signal between the fork and the new handlers is the child's once it has those.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        child = os.fork()
        if child == 0:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(told)
            _follow(end, held)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
            return serve(Life(restarts, news))
        os.close(end)
        os.close(news)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if not prepared and _serves(child, told):
            _prepare(prepare)
            prepared = True
        code = _wait(child)
        child = 0
        os.close(held)
        os.close(told)
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
    """The end of the child; others are those that a container's first process inherits."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return os.waitstatus_to_exitcode(status)


def _serves(child: int, told: int) -> bool:
    """Has the child served for a moment? Waits until that is so, or it ends."""
    since = 0.0
    while not since or time.monotonic() - since < SETTLE:
        if select.select([told], [], [], LOOK)[0]:
            if not os.read(told, 1):
                return False  # The end of the pipe: it has ended.
            since = time.monotonic()
        # Where another process of its still holds the pipe. It stays to be waited for.
        elif os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return False
    return True


def _prepare(prepare: Callable[[], None]) -> None:
    try:
        prepare()
    except Exception:  # The parent goes on, whatever it was: the child has got over it.
        log.exception("the parent could not prepare for another API process")
    gc.collect()
    gc.freeze()  # What it holds is looked at no more, so that children share it.


def _follow(end: int, held: int) -> None:
    """In the child: leave with the parent, however it ends; leave Ctrl-C in the terminal to it."""
    os.close(held)
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait() -> None:
        os.read(end, 1)
        os._exit(ORPHANED)

    THREADS.keep("lifeline", wait)

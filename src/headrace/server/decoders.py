"""Decoding of clients' files: owners in turn; each decoding stops when its client leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from subprocess import Popen
from threading import Lock
from typing import Any, TypeVar

from .hands import Hands

Result = TypeVar("Result")

AT_ONCE = 3
"""Files decoded at the same time; at most one of them is a long sound."""
MOST_WAITING = 128
MOST_OF_ONE = 64
"""Maximum files that wait to be decoded: in all, and of one owner (long ones counted apart)."""


class Decoders:
    """Slots for decoding child processes, for one event loop."""

    def __init__(self) -> None:
        self._hands = Hands(AT_ONCE, most_waiting=MOST_WAITING, most_of_one=MOST_OF_ONE)

    async def run(self, work: Callable[..., Result], *arguments: Any, long: bool = False) -> Result:
        """Run `work(*arguments, on_child=…)` in a thread, like `media.decode_into`.

        Raises the errors of `work`, and `Overloaded` if too many wait. If the client leaves, it is
        not started, or its child is killed; in both cases it has ended when this returns.
        """
        stop = ChildKiller()
        return await self._hands.stoppable(
            partial(work, *arguments, on_child=stop.took), stop, large=long
        )

    def close(self) -> None:
        """End the threads once their current work is done."""
        self._hands.close()


class ChildKiller:
    """Callable that kills a child which another thread starts, or has started."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._child: Popen[bytes] | None = None
        self._called = False

    def __call__(self) -> None:
        with self._lock:
            self._called = True
            if self._child is not None:
                self._child.kill()

    def took(self, child: Popen[bytes]) -> None:
        """Take the child; kill it if the kill was already requested."""
        with self._lock:
            self._child = child
            if self._called:
                child.kill()

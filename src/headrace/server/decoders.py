"""Decodings of clients' sounds: owners in turn, each stopped when its client leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from subprocess import Popen
from threading import Lock
from typing import Any, TypeVar

from .hands import Hands

Result = TypeVar("Result")

AT_ONCE = 3
"""Sounds that are decoded side by side; one of them at most is long."""
MOST_WAITING = 128
MOST_OF_ONE = 64
"""Sounds that wait to be decoded, long ones apart: of all owners, and of one."""


class Decoders:
    """Places for the children that decode, for one event loop."""

    def __init__(self) -> None:
        self._hands = Hands(AT_ONCE, most_waiting=MOST_WAITING, most_of_one=MOST_OF_ONE)

    async def run(self, work: Callable[..., Result], *arguments: Any, long: bool = False) -> Result:
        """`work(*arguments, on_child=…)` in a thread, as `media.decode_into` has it.

        Raises what it raises, and `Overloaded` where too many wait. Where the client leaves it is
        not begun any more, or its child is killed; either way it has ended when this returns.
        """
        stop = ChildKiller()
        return await self._hands.stoppable(
            partial(work, *arguments, on_child=stop.took), stop, large=long
        )

    def close(self) -> None:
        """End the threads when they have done what they do."""
        self._hands.close()


class ChildKiller:
    """Kills a child that another thread starts, or has started."""

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
        """Be given the child."""
        with self._lock:
            self._child = child
            if self._called:
                child.kill()

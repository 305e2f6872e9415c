"""Bells: what wakes a thread that waits on a channel, other than a message of that channel."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Bell(Protocol):
    """`Channel.watch` its descriptor, and clear it after each wait."""

    def fileno(self) -> int:
        """The descriptor that becomes readable."""

    def clear(self) -> bool:
        """Was it rung since the last time? Never waits."""


def wait(bell: Bell, seconds: float) -> None:
    """Sleep until it rings, at most so long."""
    select.select([bell], [], [], seconds)
    bell.clear()


class Wake:
    """A bell that any thread rings. Ringing twice before it is heard is ringing once."""

    def __init__(self) -> None:
        # A pipe: the module of sockets is 2 ms of a start, and these two are all that it is for.
        heard, rung = os.pipe()
        os.set_blocking(heard, False)
        os.set_blocking(rung, False)
        self._heard, self._rung = os.fdopen(heard, "rb", 0), os.fdopen(rung, "wb", 0)

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        """From any thread; never waits. After `close` nobody hears it."""
        with contextlib.suppress(OSError, ValueError):  # Full: it has been rung enough. Closed.
            self._rung.write(b"\0")

    def clear(self) -> bool:
        rung = False
        with contextlib.suppress(OSError, ValueError):
            while self._heard.read(4096):
                rung = True
        return rung

    def close(self) -> None:
        self._heard.close()
        self._rung.close()


@dataclass(slots=True)
class AnyBell:
    """Rings when one of several does."""

    _bells: Sequence[Bell]
    _before: Callable[[], None] = lambda: None
    """To be done before they are cleared."""
    _poll: select.epoll = field(default_factory=select.epoll)

    def __post_init__(self) -> None:
        for bell in self._bells:
            self._poll.register(bell.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._poll.fileno()

    def clear(self) -> bool:
        self._before()
        rung = [bell.clear() for bell in self._bells]
        return any(rung)

    def close(self) -> None:
        self._poll.close()

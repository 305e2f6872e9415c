"""Bells: they wake a thread that waits on a channel, without a message."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Bell(Protocol):
    """Source of wake-ups: `Channel.watch` its descriptor, and clear it after each wait."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""

    def clear(self) -> bool:
        """Return whether it was rung since the last time. Never waits."""


def wait(bell: Bell, seconds: float) -> None:
    """Sleep until the bell rings, at most `seconds`."""
    select.select([bell], [], [], seconds)
    bell.clear()


class Wake:
    """Bell that any thread rings. Two rings before a clear are one."""

    def __init__(self) -> None:
        # A pipe: importing the module of sockets just for these two takes 2 ms of a start.
        heard, rung = os.pipe()
        os.set_blocking(heard, False)
        os.set_blocking(rung, False)
        self._heard, self._rung = os.fdopen(heard, "rb", 0), os.fdopen(rung, "wb", 0)

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        """Ring from any thread; never waits. After `close` it has no effect."""
        with contextlib.suppress(OSError, ValueError):  # Full: already rung. Or closed.
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
    """Bell that rings when one of several does."""

    _bells: Sequence[Bell]
    _before: Callable[[], None] = lambda: None
    """Called before the bells are cleared."""
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

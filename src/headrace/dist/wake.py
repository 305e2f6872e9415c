"""Bells: what wakes a thread that waits on a channel, other than a message of that channel."""

from __future__ import annotations

import contextlib
import select
import socket
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
        self._heard, self._rung = socket.socketpair()
        self._heard.setblocking(False)
        self._rung.setblocking(False)

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        """From any thread; never waits. After `close` nobody hears it."""
        with contextlib.suppress(BlockingIOError, OSError):  # Full: it has been rung enough.
            self._rung.send(b"\0")

    def clear(self) -> bool:
        rung = False
        with contextlib.suppress(BlockingIOError, OSError):
            while self._heard.recv(4096):
                rung = True
        return rung

    def close(self) -> None:
        self._heard.close()
        self._rung.close()

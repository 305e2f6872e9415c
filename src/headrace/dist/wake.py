"""A bell: any thread rings it, and the thread that waits on a channel hears it."""

from __future__ import annotations

import contextlib
import socket


class Wake:
    """`Channel.watch` its descriptor. Ringing twice before it is heard is ringing once."""

    def __init__(self) -> None:
        self._heard, self._rung = socket.socketpair()
        self._heard.setblocking(False)
        self._rung.setblocking(False)

    def fileno(self) -> int:
        """The descriptor that becomes readable."""
        return self._heard.fileno()

    def ring(self) -> None:
        """From any thread; never waits. After `close` nobody hears it."""
        with contextlib.suppress(BlockingIOError, OSError):  # Full: it has been rung enough.
            self._rung.send(b"\0")

    def clear(self) -> None:
        """It was heard."""
        with contextlib.suppress(BlockingIOError, OSError):
            while self._heard.recv(4096):
                pass

    def close(self) -> None:
        self._heard.close()
        self._rung.close()

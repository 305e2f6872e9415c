"""Two-way channels of typed messages between two processes of one machine.

ZeroMQ over Unix sockets in a private folder, msgpack by msgspec; one message is one frame. The
parent binds, the child connects and speaks first: before that the parent has nobody to send to.
A channel is strictly one to one; each end belongs to one thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

_BURST = 64
"""Messages taken in one callback of the event loop before others get their turn."""

_PREFIX = "headrace-"
_LOCK = "owner"
_ABANDONED_SECONDS = 60.0
"""Younger folders may not have their lock yet."""


class PeerGone(ConnectionError):
    """The other end of a channel is not there (any more)."""


class PrivateFolder:
    """A new folder that only this user can enter, short enough for Unix socket paths.

    A lock in it says that its owner lives. Whoever makes the next one removes those whose owners
    were killed; the lock, unlike a process id, means the same in every container.
    """

    def __init__(self) -> None:
        self.closed = False
        for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            _remove_abandoned(old)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = self._locked()

    def _locked(self) -> int:
        lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def ensure(self) -> None:
        """Make folder and lock again where somebody removed them. Raises `OSError`."""
        if not (self.path / _LOCK).exists():
            self.path.mkdir(mode=0o700, exist_ok=True)
            lock, self._lock = self._lock, self._locked()
            os.close(lock)

    def close(self) -> None:
        """Remove the folder. May be called twice."""
        if not self.closed:
            self.closed = True
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


def _remove_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError):
        state = folder.lstat()
        young = time.time() - state.st_mtime < _ABANDONED_SECONDS
        if young or state.st_uid != os.getuid() or not stat.S_ISDIR(state.st_mode):
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # Raises while its owner lives.
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def address(folder: Path, name: str) -> str:
    """Address of the channel `name` in a private folder."""
    path = folder / f"{name}.sock"
    assert len(os.fsencode(path)) < 104, f"{path} is too long for a Unix socket"
    return f"ipc://{path}"


class _End:
    def __init__(
        self, where: str, receives: Any, *, bind: bool, context: zmq.Context[Any] | None = None
    ) -> None:
        """`context`: of other channels too, and not ended with this one; None: its own."""
        self.closed = True  # Until everything below has been had.
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(receives)
        self._shared = context is not None
        self._context = context or zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        if bind:
            self._socket.bind(where)
        else:
            self._socket.connect(where)
        self.closed = False

    def send(self, message: Any) -> None:
        """Queue one message; never waits. Raises `PeerGone` where there is no other end."""
        if self.closed:
            raise PeerGone("the channel is closed")
        try:
            self._socket.send(self._encoder.encode(message), flags=zmq.NOBLOCK)
        except zmq.Again:
            raise PeerGone("nobody is connected to the channel") from None

    def _take(self) -> Any | None:
        try:
            return self._decoder.decode(self._socket.recv(flags=zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self) -> None:
        """Let go of the socket; what is queued is still delivered for a moment."""
        if not self.closed:
            self.closed = True
            self._socket.close()
            if not self._shared:
                self._context.term()


class Channel(_End):
    """The blocking end."""

    def __init__(self, where: str, receives: Any, *, bind: bool) -> None:
        """`receives`: the type (a union of tagged structs) of what the other end sends."""
        super().__init__(where, receives, bind=bind)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, descriptor: int) -> None:
        """Wake `receive` also when this file descriptor becomes readable (a pidfd: a death)."""
        self._poller.register(descriptor, zmq.POLLIN)

    def receive(self, timeout: float | None = 0.0) -> list[Any]:
        """All messages that are there; with none, wait up to `timeout` seconds (None: for ever).

        An empty list: none came, or a watched descriptor woke it. Raises `msgspec.DecodeError`
        or `msgspec.ValidationError` for what is not a message.
        """
        messages: list[Any] = []
        if timeout == 0.0 and not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return messages  # Half of what it costs to be told so by an exception.
        first = self._take()
        if first is None and timeout != 0.0:
            milliseconds = None if timeout is None else max(1, int(timeout * 1000))
            self._poller.poll(milliseconds)
            first = self._take()
        while first is not None:
            messages.append(first)
            first = self._take()
        return messages

    def receive_one(self, timeout: float | None) -> Any | None:
        """The next message, or None when none came in `timeout` seconds or a watch fired."""
        message = self._take()
        if message is None:
            self._poller.poll(None if timeout is None else max(1, int(timeout * 1000)))
            message = self._take()
        return message


class AsyncChannel(_End):
    """The end of an event loop: calls back for every message, in order."""

    def __init__(
        self,
        where: str,
        receives: Any,
        *,
        on_message: Callable[[Any], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        # ZeroMQ ends the process that it cannot get a thread in. One context, whose threads are
        # there from the first channel on, asks for none when an engine is started again.
        super().__init__(where, receives, bind=True, context=zmq.Context.instance())
        self._on_message = on_message
        self._loop = loop
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._scheduled = False
        self.received_at = time.monotonic()
        """`time.monotonic()` of the latest message, or of the opening."""
        loop.add_reader(self._descriptor, self._drain)

    def send(self, message: Any) -> None:
        super().send(message)
        # The descriptor is edge-triggered and sending may consume the edge: look again.
        self._again()

    def _again(self) -> None:
        if not self._scheduled and not self.closed:
            self._scheduled = True
            self._loop.call_soon(self._drain_again)

    def _drain_again(self) -> None:
        self._scheduled = False
        self._drain()

    def _drain(self) -> None:
        for _ in range(_BURST):
            if self.closed:
                return
            message = self._take()
            if message is None:
                return
            self.received_at = time.monotonic()
            self._on_message(message)
        self._again()

    def flush(self) -> None:
        """Take everything that has arrived, now: before the end of a dead peer is reported."""
        while not self.closed:
            message = self._take()
            if message is None:
                return
            self.received_at = time.monotonic()
            self._on_message(message)

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(ValueError, OSError, RuntimeError):
                self._loop.remove_reader(self._descriptor)
        super().close()

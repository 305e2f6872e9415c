"""Two-way channels of typed messages between two processes.

A channel is a Unix socket in a private folder, or a connection made by `dist.hosts`. Messages are
msgpack by msgspec. One message is one frame: its length in four bytes, then its bytes. The parent
binds; the child connects and sends first: before that the parent has no peer. A channel is strictly
one to one; each end belongs to one thread.

Plain sockets, no messaging library: a library with its own threads wakes two of them for each
message. If all cores decode, each wake-up delays the next step (docs/adr/0073).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..base.errors import OptionError
from ..base.foreign import msgpack_reader

_BURST = 64
"""Messages taken in one callback of the event loop before other callbacks run."""
_READ_BYTES = 256 << 10
_SOCKET_BYTES = 1 << 20
"""Socket buffer requested for data sent and not yet read; the rest waits in the sender."""
_LINGER_SECONDS = 0.2
"""Seconds for which a closing end waits for its sent data to leave."""
_LENGTH = struct.Struct(">I")

_MOST_PATH = 103
"""Bytes of a path that fit into the address of a Unix socket on every system."""

_PREFIX = "headrace-"
_LOCK = "owner"
_ABANDONED_SECONDS = 60.0
"""Age in seconds up to which a folder may lack its lock."""


class PeerGone(ConnectionError):
    """Error: the other end of a channel is not there, or no longer."""


class PrivateFolder:
    """A new folder that only this user can enter.

    A lock in it shows that its owner lives. Making a new folder removes those of killed owners.
    Unlike a process id, the lock means the same in every container.
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
        """Make folder and lock again if they were removed. Raises `OSError`."""
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
    """Return the address of the channel `name` in a private folder."""
    return str(folder / f"{name}.sock")


@contextlib.contextmanager
def _fitting(where: str) -> Iterator[str]:
    """Yield `where`, or a shorter path to the same socket that is valid inside the block.

    Raises `OptionError` if the path is too long and the system has no shorter one.
    """
    if len(os.fsencode(where)) <= _MOST_PATH:
        yield where
        return
    path = Path(where)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        short = f"/proc/self/fd/{folder}"
        if not os.path.isdir(short):
            raise OptionError(
                f"{path.parent} is too long a path for the sockets between our processes; set "
                "TMPDIR to a folder with a shorter one"
            )
        yield f"{short}/{path.name}"
    finally:
        os.close(folder)


class _End:
    """One end of a channel: sends and receives whole frames, and never waits."""

    def __init__(self, where: str | socket.socket, receives: Any, *, bind: bool) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decode = msgpack_reader(receives)
        self._socket: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._frames: deque[bytes] = deque()
        """Whole messages read but not taken yet."""
        self._part = bytearray()
        """Beginning of the next message."""
        self._unsent = bytearray()
        self.closed = True  # Until everything below has succeeded.
        if not isinstance(where, str):
            self._open(where)
        elif bind:
            Path(where).unlink(missing_ok=True)
            with _fitting(where) as path:
                self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._listener.bind(path)
            self._listener.listen(1)
            self._listener.setblocking(False)
        else:
            with _fitting(where) as path:
                connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connected.connect(path)
            self._open(connected)
        self.closed = False

    def send(self, message: Any) -> None:
        """Queue one message; never waits. Raises `PeerGone` if there is no other end."""
        if self.closed:
            raise PeerGone("the channel is closed")
        if self._socket is None:
            self._accept()
        if self._socket is None:
            raise PeerGone("nobody is connected to the channel")
        data = self._encoder.encode(message)
        length = _LENGTH.pack(len(data))
        if self._unsent:
            self._unsent += length
            self._unsent += data
            return
        try:
            sent = self._socket.sendmsg((length, data))
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose()
            raise PeerGone("the other end of the channel has gone") from None
        if sent < len(length) + len(data):
            self._unsent += (length + data)[sent:]
            self._wants_room(True)

    def _send_rest(self) -> None:
        """Send as much of the queued rest as fits now."""
        while self._unsent and self._socket is not None:
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:
                self._lose()
        self._wants_room(False)

    def _take(self) -> Any | None:
        """Return the next message that has been read, or None."""
        return self._decode(self._frames.popleft()) if self._frames else None

    def _read(self) -> bool:
        """Read the socket's data, up to a limit. Return False if there is none, or no peer is
        connected."""
        if self._socket is None:
            return False
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._lose()
            return False
        if self._part:
            self._part += data
            data = bytes(self._part) if self._complete(self._part) else b""
            if not data:
                return True
            self._part.clear()
        at, end = 0, len(data)
        while end - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            after = at + _LENGTH.size + length
            if after > end:
                break
            self._frames.append(data[at + _LENGTH.size : after])
            at = after
        self._part += data[at:]
        return True

    @staticmethod
    def _complete(part: bytearray) -> bool:
        """Return whether this begins with a whole frame. A long frame is not copied before its end
        has come."""
        return len(part) >= _LENGTH.size and (
            len(part) >= _LENGTH.size + _LENGTH.unpack_from(part)[0]
        )

    def _accept(self) -> None:
        """Accept the child's connection, if it has come."""
        if self._listener is None:
            return
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, OSError):
            return
        self._forget_listener()
        self._open(connected)

    def _open(self, connected: socket.socket) -> None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        connected.setblocking(False)
        self._socket = connected

    def _lose(self) -> None:
        """Drop the connection of an end that has gone; messages read from it can still be taken."""
        if self._socket is not None:
            self._forget(self._socket)
            self._socket.close()
            self._socket = None
        self._unsent.clear()

    def _forget_listener(self) -> None:
        if self._listener is not None:
            self._forget(self._listener)
            self._listener.close()
            self._listener = None

    def _wants_room(self, wanted: bool) -> None:
        """Watch for room in the socket while unsent data waits, or stop watching."""

    def _forget(self, one: socket.socket) -> None:
        """Stop watching a socket that is about to be closed."""

    def close(self) -> None:
        """Release the socket; queued data is still delivered for a moment."""
        if self.closed:
            return
        self.closed = True
        if self._unsent and self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.settimeout(_LINGER_SECONDS)
                self._socket.sendall(self._unsent)
        self._lose()
        self._forget_listener()


class Channel(_End):
    """Blocking end of a channel."""

    def __init__(self, where: str | socket.socket, receives: Any, *, bind: bool = False) -> None:
        """`where`: an address to bind or to connect to, or a socket connected to the other end,
        which may be on another host. `receives`: the type (a union of tagged structs) of the other
        end's messages."""
        self._poll = select.poll()
        super().__init__(where, receives, bind=bind)
        if self._listener is not None:
            self._poll.register(self._listener, select.POLLIN)

    def fileno(self) -> int:
        """Return the connection's descriptor, readable on a message or an end. Connect first."""
        assert self._socket is not None, "nobody is connected"
        return self._socket.fileno()

    @property
    def lost(self) -> bool:
        """Whether the other end has gone, as seen by receiving."""
        return self._socket is None and self._listener is None

    def watch(self, descriptor: int) -> None:
        """Wake `receive` also when this file descriptor becomes readable (a pidfd: a death)."""
        self._poll.register(descriptor, select.POLLIN)

    def receive(self, timeout: float | None = 0.0) -> list[Any]:
        """Return all messages that have arrived; if there are none, wait up to `timeout` seconds
        (None: forever).

        The list is empty if no message came, or if a watched descriptor woke it. Raises
        `Undecodable` for data that is not a message.
        """
        if not self._frames:
            self._wait(timeout)
        messages: list[Any] = []
        while self._frames or (messages and self._arrived()):
            messages.append(self._take())
        return messages

    def receive_one(self, timeout: float | None) -> Any | None:
        """Return the next message, or None if none came in `timeout` seconds or a watch fired."""
        if not self._frames:
            self._wait(timeout)
        return self._take()

    def _wait(self, timeout: float | None) -> None:
        """Wait until a whole message is there, a watched descriptor is ready, or the time is
        over."""
        end = None if timeout is None else time.monotonic() + timeout
        left = timeout
        while True:
            woken = self._poll.poll(None if left is None else max(0, int(left * 1000 + 0.999)))
            own = False
            for descriptor, events in woken:
                if self._listener is not None and descriptor == self._listener.fileno():
                    self._accept()
                    own = True
                elif self._socket is not None and descriptor == self._socket.fileno():
                    if events & select.POLLOUT:
                        self._send_rest()
                    if events & ~select.POLLOUT:
                        self._read()
                    own = True
            if self._frames or not own:
                return  # Also if a watched descriptor woke us, or on a spurious wake-up.
            if end is not None:
                left = max(0.0, end - time.monotonic())

    def _arrived(self) -> bool:
        """Continue reading after a burst; return True if another whole message came."""
        while self._read():
            if self._frames:
                return True
        return False

    def _open(self, connected: socket.socket) -> None:
        super()._open(connected)
        self._poll.register(connected, select.POLLIN)

    def _wants_room(self, wanted: bool) -> None:
        if self._socket is not None:
            self._poll.modify(self._socket, select.POLLIN | (select.POLLOUT if wanted else 0))

    def _forget(self, one: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(one)


class AsyncChannel(_End):
    """End of a channel in an event loop: it calls back for every message, in order."""

    def __init__(
        self,
        where: str,
        receives: Any,
        *,
        on_message: Callable[[Any], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(where, receives, bind=True)
        self._on_message = on_message
        self._loop = loop
        self._scheduled = False
        self.received_at = time.monotonic()
        """`time.monotonic()` of the latest message, or of the opening."""
        assert self._listener is not None
        loop.add_reader(self._listener.fileno(), self._accept)

    def flush(self) -> None:
        """Take everything that has arrived, before the end of a dead peer is reported."""
        if self._socket is None:
            self._accept()
        while not self.closed and (self._frames or self._read()):
            self._give(len(self._frames))

    def _drain(self) -> None:
        if not self._frames:
            self._read()
        self._give(_BURST)
        if self._frames and not (self._scheduled or self.closed):
            self._scheduled = True
            self._loop.call_soon(self._drain_again)

    def _drain_again(self) -> None:
        self._scheduled = False
        if not self.closed:
            self._drain()

    def _give(self, most: int) -> None:
        for _ in range(most):
            if self.closed or not self._frames:
                return
            self.received_at = time.monotonic()
            self._on_message(self._take())

    def _open(self, connected: socket.socket) -> None:
        super()._open(connected)
        self._loop.add_reader(connected.fileno(), self._drain)

    def _wants_room(self, wanted: bool) -> None:
        if self._socket is not None:
            if wanted:
                self._loop.add_writer(self._socket.fileno(), self._send_rest)
            else:
                self._loop.remove_writer(self._socket.fileno())

    def _forget(self, one: socket.socket) -> None:
        with contextlib.suppress(ValueError, OSError, RuntimeError):
            self._loop.remove_reader(one.fileno())
            self._loop.remove_writer(one.fileno())

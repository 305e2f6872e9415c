"""Connections between the processes of several hosts: both ends prove that they have one key.

    magic, nonce         32 bytes each way
    dialler's proof      HMAC-SHA-256 over role, both nonces and the purpose of the connection
    listener's proof

Neither end reads further before that. Later traffic is neither encrypted nor signed, as with the
collective libraries of GPUs: the network between ranks is trusted to carry it, and the key keeps
others on that network out.
"""

from __future__ import annotations

import hmac
import os
import queue
import socket
import struct
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum

from ..base.errors import EngineDead
from ..obs.threads import THREADS

PROOF_SECONDS = 5.0
"""Seconds for which one end waits for the other's proof."""
_MAGIC = b"HRRANK01"
_NONCE = 24
_FOR = struct.Struct(">HH")
_REFUSAL = bytes(32)
"""Sent instead of a proof, to distinguish a wrong key from a lack of room."""
_UNPROVED = "it has no room or is ending, and closes the connection before it proves its key"
_TRY_AGAIN = 0.1
_AT_ONCE = 64
"""Connections that may be in their proof at a time."""
_SHARE = 32
"""Places that one address may take."""
_CLOSING = 0.005
"""Pause after a connection was closed to make room. A stranger that reconnects at once takes one
place per pause. The others keep theirs `_SHARE` times as long, enough for a rank's proof."""
_SOCKET_BYTES = 4 << 20
"""Socket buffer requested for data on its way: it holds an exchange of a long step."""


class Use(IntEnum):
    CONTROL = 0
    PULSE = 1
    EXCHANGE = 2


@dataclass(frozen=True, slots=True)
class HostPort:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A process that connected and has the key."""

    use: Use
    rank: int
    connection: socket.socket

    @property
    def host(self) -> str:
        return str(self.connection.getpeername()[0]).removeprefix("::ffff:")


class NoRank(EngineDead):
    """Error: the other end does not have our key, or is not a rank."""


def dial(address: HostPort, key: bytes, use: Use, rank: int, *, seconds: float) -> socket.socket:
    """Connect for `use` of `rank`; retry until the time is over: the other end may not be there
    yet, or have no room. Raises `EngineDead` with the last cause, `NoRank` at once."""
    end, why = time.monotonic() + seconds, "it does not answer"
    while (left := end - time.monotonic()) > 0:
        try:
            connection = socket.create_connection((address.host, address.port), timeout=left)
        except OSError as error:
            why = error.strerror or str(error) or why
            time.sleep(min(_TRY_AGAIN, left))
            continue
        try:
            _prove(connection, key, _FOR.pack(use, rank))
        except (OSError, NoRank) as error:
            connection.close()
            if isinstance(error, NoRank):
                raise NoRank(f"{address}: {error}") from None
            why = _UNPROVED if isinstance(error, ConnectionError) else str(error)
            why = "it does not say who it is" if isinstance(error, TimeoutError) else why
            time.sleep(min(_TRY_AGAIN, max(0.0, end - time.monotonic())))
            continue
        return _ready(connection)
    raise EngineDead(f"{address} was not reached in {seconds:g} s: {why}")


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return connection


def _prove(connection: socket.socket, key: bytes, purpose: bytes) -> None:
    """Prove the key as the end that dials."""
    connection.settimeout(PROOF_SECONDS)
    mine = os.urandom(_NONCE)
    connection.sendall(_MAGIC + mine)
    theirs = _hello(connection)
    connection.sendall(purpose + _proof(key, b"dials", mine, theirs, purpose))
    if not hmac.compare_digest(_read(connection, 32), _proof(key, b"hears", theirs, mine, purpose)):
        raise NoRank("it has another key")


def _verify(connection: socket.socket, key: bytes) -> tuple[Use, int]:
    """Verify and prove the key as the end that listens; return the other's (use, rank). Raises
    `NoRank`, `OSError`."""
    connection.settimeout(PROOF_SECONDS)
    mine = os.urandom(_NONCE)
    connection.sendall(_MAGIC + mine)
    theirs = _hello(connection)
    purpose = _read(connection, _FOR.size)
    if not hmac.compare_digest(_read(connection, 32), _proof(key, b"dials", theirs, mine, purpose)):
        connection.sendall(_REFUSAL)
        raise NoRank("it has another key")
    use, rank = _FOR.unpack(purpose)
    connection.sendall(_proof(key, b"hears", mine, theirs, purpose))
    try:
        return Use(use), rank
    except ValueError:
        raise NoRank(f"it wants a connection of kind {use}") from None


def _hello(connection: socket.socket) -> bytes:
    said = _read(connection, len(_MAGIC) + _NONCE)
    if not said.startswith(_MAGIC):
        raise NoRank("it speaks another protocol")
    return said[len(_MAGIC) :]


def _proof(key: bytes, role: bytes, own: bytes, other: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, role + own + other + purpose, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError(_UNPROVED)
        data += part
    return data


@dataclass(slots=True)
class Door:
    """Listening end for other ranks. Each connection is verified in its own thread. When places are
    short, an old connection is closed for a newer one, so silent ones do not make others wait."""

    listener: socket.socket
    key: bytes
    _arrived: queue.Queue[Arrival] = field(default_factory=queue.Queue)
    _proving: dict[socket.socket, str] = field(default_factory=dict)
    """Connections in their proof, oldest first, each with its address."""
    _threads: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    @classmethod
    def open(cls, host: str, port: int, key: bytes) -> Door:
        """Listen there; "": at all addresses. Raises `EngineDead`."""
        try:
            both = host == "" and socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
            listener = socket.create_server(
                (host, port), family=family, backlog=_AT_ONCE, dualstack_ipv6=both
            )
        except OSError as error:
            where = HostPort(host or "0.0.0.0", port)
            raise EngineDead(f"ranks cannot be awaited at {where}: {error.strerror}") from None
        door = cls(listener, key)
        THREADS.keep("door", door._listen)
        return door

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection, (host, *_) = self.listener.accept()
            except OSError:
                # It is closed, the other end has left, or no descriptor is free.
                time.sleep(0.0 if self._closed else _TRY_AGAIN)
                continue
            if self._make_room(host):
                time.sleep(_CLOSING)
            with self._lock:
                self._threads += (room := self._threads < 2 * _AT_ONCE)
                self._proving |= {connection: host} if room else {}
            if not room or THREADS.errand("door", self._let_in, connection) is None:
                self._leave(connection, started=room)
                connection.close()

    def _make_room(self, host: str) -> bool:
        """Close the oldest connection of this address if the address has its full share. If all
        places are taken, close the oldest of the address with the most. Return False if there is
        room."""
        with self._lock:
            counts = Counter(self._proving.values())
            if counts[host] >= _SHARE:
                crowded = host
            elif len(self._proving) >= _AT_ONCE:
                crowded = counts.most_common(1)[0][0]
            else:
                return False
            oldest = next(one for one, where in self._proving.items() if where == crowded)
            del self._proving[oldest]
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # Its thread wakes, and closes it.
        return True

    def _let_in(self, connection: socket.socket) -> None:
        try:
            use, rank = _verify(connection, self.key)
            with self._lock:
                self._proving.pop(connection, None)
            self._arrived.put(Arrival(use, rank, _ready(connection)))
        except (OSError, NoRank):
            connection.close()
        finally:
            self._leave(connection, started=True)

    def _leave(self, connection: socket.socket, *, started: bool) -> None:
        with self._lock:
            self._threads -= started
            self._proving.pop(connection, None)

    def next(self, seconds: float) -> Arrival | None:
        """Return the next arrival, or None if none came in that time."""
        with suppress(queue.Empty):
            return self._arrived.get(timeout=max(0.0, seconds))
        return None

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        while (late := self.next(0.0)) is not None:
            late.connection.close()

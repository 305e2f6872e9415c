"""Connections to replicas: HTTP/1.1, kept alive, one exchange at a time, parsed by httptools.

A body is passed on in the parts in which it arrived, never collected. If its reader is slow, the
connection stops reading, and so the replica stops writing.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from contextlib import suppress
from typing import cast

import httptools

from ..base.errors import HeadraceError

MAX_HEAD = 64 * 1024
"""Bytes of a response's headers, and of its trailers."""
AHEAD = 256 * 1024
"""Maximum bytes of a response that may wait here for the client."""
CONNECT_SECONDS = 2.0
KEPT = 64
"""Idle connections kept per replica."""

Headers = list[tuple[bytes, bytes]]


class ReplicaLost(HeadraceError):
    """Failure: the replica refused, closed or broke the connection."""

    status = 502
    type = "overloaded_error"
    code = "replica_lost"


class ReplicaSilent(ReplicaLost):
    """Failure: the replica accepted the request and was silent for too long."""

    status = 504
    type = "timeout_error"
    code = "replica_silent"


class Upstream(asyncio.Protocol):
    """One connection to a replica."""

    def __init__(self) -> None:
        self._seconds: float | None = None
        """Longest silence of the replica in this exchange."""
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.silent = False
        """Whether the replica's silence ended it."""
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parts: deque[bytes] = deque()
        self._held = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._interim = False
        self._sized = False
        self._lasts = False
        self._before = self._named = 0
        self.status = 0
        """HTTP status of the response; 0 until its headers are complete."""
        self.headers: Headers = []
        self.complete = True
        """Whether no response is under way."""
        self.closed = False
        self.used = False
        """Whether an earlier exchange used this connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's derives from another class.

    def connection_lost(self, _error: Exception | None) -> None:
        self.closed = True
        self._disarm()
        if self.status and not self._sized:
            self.complete = True  # The connection's end was the body's end (RFC 9112, 6.3).
        self._wake()

    def data_received(self, data: bytes) -> None:
        self._heard = time.monotonic()
        if not self.status:
            self._before += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.abort()
        if not self.status and self._before > MAX_HEAD:
            self.abort()
        self._wake()

    def on_message_begin(self) -> None:
        if self.status:
            raise ValueError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named += len(name) + len(value)
        if self._named > MAX_HEAD:
            raise ValueError("the trailers do not end")  # Endless headers are caught earlier.
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if not 100 <= status < 600:
            raise ValueError("no status of HTTP")
        self._interim = 100 <= status < 200
        if self._interim:
            self.headers = []
            return
        self.status = status
        self._sized = status in (204, 304) or any(
            name in (b"content-length", b"transfer-encoding") for name, _ in self.headers
        )

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._held += len(data)
        if self._held > AHEAD and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.complete = not self._interim
        # Asked here: after the message the parser has forgotten how its length was given.
        self._lasts = self._sized and self._parser.should_keep_alive()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def ask(
        self, head: bytes, body: bytes | bytearray = b"", *, seconds: float | None = None
    ) -> None:
        """Send a request and wait for the response's headers. Raises `ReplicaLost`.

        `seconds`: longest silence of the replica until the response is complete; None: no limit.
        """
        self.status, self.headers, self.complete = 0, [], False
        self._sized = self._lasts = False
        self._before = self._named = 0
        self._parser = httptools.HttpResponseParser(self)
        if self._transport is None or self.closed:
            raise ReplicaLost("the replica closed the connection")
        self._disarm()
        self._seconds, self._heard = seconds, time.monotonic()
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._late)
        self._transport.write(head)
        if body:
            self._transport.write(body)  # Not joined to the headers: that would copy it.
        while not self.status:
            if self.closed:
                raise self._lost("closed the connection before it answered")
            await self._wait()

    def _late(self) -> None:
        """End the connection if nothing arrived for `_seconds`; otherwise check again when due."""
        assert self._seconds is not None
        # Nothing can arrive while the client does not read.
        quiet = 0.0 if self._paused else time.monotonic() - self._heard
        if quiet < self._seconds:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._seconds - quiet, self._late)
            return
        self.silent = True
        self.abort()

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _lost(self, what: str) -> ReplicaLost:
        if self.silent:
            return ReplicaSilent(f"the replica said nothing for {self._seconds:g} seconds")
        return ReplicaLost(f"the replica {what}")

    async def part(self) -> bytes:
        """Return the part of the body that has arrived; empty at its end. Raises `ReplicaLost`."""
        while not self._parts:
            if self.complete:
                self.used = True
                return b""
            if self.closed:
                raise self._lost("closed the connection within its answer")
            await self._wait()
        data = b"".join(self._parts)
        self._parts.clear()
        self._held = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    @property
    def peer(self) -> str:
        """Peer address as `ip:port`; empty if the peer is gone or has no internet address."""
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        if not isinstance(name, tuple):
            return ""
        return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

    @property
    def reusable(self) -> bool:
        return self.complete and self.used and self._lasts and not self.closed and not self._parts

    def rest(self) -> None:
        """Mark the connection idle: until the next exchange, silence is not a fault."""
        self._disarm()

    def abort(self) -> None:
        """Abort the connection: the replica sees the disconnect and cancels."""
        self.closed = True
        self._disarm()
        if self._transport is not None:
            self._transport.abort()
        self._wake()


class Connections:
    """Connections to one replica: those in use and the idle ones."""

    def __init__(self, host: str, port: int, tls: bool) -> None:
        self._host, self._port = host, port
        self._tls = ssl.create_default_context() if tls else None
        self._idle: list[Upstream] = []
        self._open: set[Upstream] = set()

    async def take(self, *, new: bool = False) -> Upstream:
        """Return a connection, kept or new. Raises `ReplicaLost`."""
        while self._idle and not new:
            kept = self._idle.pop()
            if not kept.closed:
                self._open.add(kept)
                return kept
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, made = await loop.create_connection(
                    Upstream, self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError, UnicodeError):  # UnicodeError: an invalid host name.
            raise ReplicaLost("the replica cannot be reached") from None
        self._open.add(made)
        return made

    def give_back(self, one: Upstream) -> None:
        """Keep a connection if its response is complete; otherwise close it."""
        self._open.discard(one)
        if one.reusable and len(self._idle) < KEPT:
            one.rest()
            self._idle.append(one)
        else:
            one.abort()

    def abort(self) -> None:
        """Abort all connections: each exchange sees a lost replica."""
        for one in (*self._open, *self._idle):
            with suppress(OSError):
                one.abort()
        self._idle.clear()

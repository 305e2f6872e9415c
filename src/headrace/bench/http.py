"""HTTP/1.1 for load generation: one connection, one request at a time, bytes stamped on arrival.

A library would stamp a chunk after its own parsing and buffering; here the clock is read first in
`data_received`. Knows content-length, chunked bodies and bodies until close, keeps connections
alive, and nothing more.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from ..base.errors import InvalidRequest

OnBody = Callable[[int, bytes], None]
"""(monotonic nanoseconds, bytes of the body) as they come."""

MAX_HEAD = 64 * 1024


class ConnectionLost(Exception):
    """The server closed, refused or broke the protocol."""

    stale = False
    """Whether a kept connection was closed while the request was on its way: nothing was answered,
    so the request may be sent again on a new one (RFC 9110, 9.2.2; curl and browsers do it)."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server."""

    host: str
    port: int
    tls: bool
    path: str
    """Prefix of all paths, without a slash at its end."""

    @property
    def authority(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether the host is this machine, whose counters are then the server's."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")


def parse_url(url: str) -> Address:
    """Parse `http://host:port/prefix`, without a final `/v1`; raise `InvalidRequest` if invalid."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise InvalidRequest(f"not an http address: {url!r}", param="url")
    tls = parts.scheme == "https"
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.hostname, port or (443 if tls else 80), tls, path)


@dataclass(slots=True)
class Reply:
    """Status line and headers, and when the answer ended."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    end_ns: int = 0


class Connection(asyncio.Protocol):
    """A keep-alive connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._reply: Reply | None = None
        self._on_body: OnBody = lambda _when, _data: None
        self._done: asyncio.Future[Reply] | None = None
        self._left = 0
        """Bytes of the body (or chunk) still to come; -1: until the connection closes."""
        self._chunked = False
        self._trailer = False
        self._served = 0
        """Requests that were answered on this connection."""
        self.usable = False

    @classmethod
    async def open(cls, address: Address, timeout: float) -> Connection:
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if address.tls else None
        try:
            async with asyncio.timeout(timeout):
                _, connection = await loop.create_connection(
                    cls, address.host, address.port, ssl=context
                )
        except TimeoutError:
            raise ConnectionLost(f"no connection to {address.authority} in {timeout:g} s") from None
        except OSError as error:
            raise ConnectionLost(
                f"cannot connect to {address.authority}: {error.strerror or error}"
            ) from None
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods but not the base class.
        self._transport = cast(asyncio.Transport, transport)
        self.usable = True

    def send(self, request: bytes, on_body: OnBody) -> asyncio.Future[Reply]:
        """Send a whole request; the future ends with the reply, the body goes to `on_body`."""
        assert self.usable
        assert self._done is None or self._done.done(), "one request at a time"
        self._reply = None
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        assert self._transport is not None
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        if self._done is None or self._done.done():
            self.close()  # Bytes without a request.
            return
        self._buffer += data
        try:
            self._parse(now)
        except (ValueError, ConnectionLost) as error:
            self._fail(f"broken HTTP from the server: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._done is None or self._done.done():
            return
        if self._reply is not None and self._left == -1:
            self._finish(time.monotonic_ns())
            return
        what = "before it answered" if self._reply is None else "in the middle of an answer"
        stale = self._served > 0 and self._reply is None and not self._buffer
        self._fail(f"the server closed the connection {what}", stale=stale)

    def _parse(self, now: int) -> None:
        if self._reply is None and not self._head():
            return
        if self._chunked:
            self._chunks(now)
            return
        data, self._buffer = bytes(self._buffer), bytearray()
        if data:
            self._on_body(now, data)
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._finish(now)

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD:
                raise ConnectionLost("headers without end")
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        status = lines[0].split(" ", 2)
        if not status[0].startswith("HTTP/1."):
            raise ConnectionLost(f"{lines[0]!r:.60} is no status line")
        reply = Reply(int(status[1]))
        for line in lines[1:]:
            name, _, value = line.partition(":")
            reply.headers[name.strip().lower()] = value.strip()
        if reply.status == 100:
            return self._head()
        self._reply = reply
        self._chunked = "chunked" in reply.headers.get("transfer-encoding", "").lower()
        self._trailer = False
        length = reply.headers.get("content-length")
        self._left = 0 if self._chunked else int(length) if length is not None else -1
        return True

    def _chunks(self, now: int) -> None:
        buffer = self._buffer
        while True:
            if self._left:  # Inside a chunk; the count includes its closing line break.
                take = min(self._left, len(buffer))
                data = bytes(buffer[: min(take, max(0, self._left - 2))])
                del buffer[:take]
                self._left -= take
                if data:
                    self._on_body(now, data)
                if self._left:
                    return
            end = buffer.find(b"\r\n")
            if end < 0:
                return
            line = bytes(buffer[:end])
            del buffer[: end + 2]
            if self._trailer:
                if not line:
                    self._finish(now)
                    return
                continue
            size = int(line.split(b";")[0], 16)
            if size == 0:
                self._trailer = True
            else:
                self._left = size + 2

    def _finish(self, now: int) -> None:
        assert self._reply is not None
        assert self._done is not None
        self._reply.end_ns = now
        self._served += 1
        if self._reply.headers.get("connection", "").lower() == "close" or self._left == -1:
            self.close()
        if not self._done.done():
            self._done.set_result(self._reply)

    def _fail(self, message: str, *, stale: bool = False) -> None:
        self.close()
        if self._done is not None and not self._done.done():
            lost = ConnectionLost(message)
            lost.stale = stale
            self._done.set_exception(lost)


class Pool:
    """Connections to one server, reused last in, first out."""

    def __init__(self, address: Address, *, connect_timeout: float = 10.0) -> None:
        self.address = address
        self._timeout = connect_timeout
        self._idle: list[Connection] = []
        self.opened = 0

    async def take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return await self.fresh()

    async def fresh(self) -> Connection:
        """Open a new connection, even if others are idle."""
        self.opened += 1
        return await Connection.open(self.address, self._timeout)

    async def request(self, data: bytes, on_body: OnBody) -> Reply:
        """Send and wait for the end; retry once on a new connection if the kept one was stale."""
        try:
            return await self._request(await self.take(), data, on_body)
        except ConnectionLost as error:
            if not error.stale:
                raise
        return await self._request(await self.fresh(), data, on_body)

    async def _request(self, connection: Connection, data: bytes, on_body: OnBody) -> Reply:
        reply = connection.send(data, on_body)
        try:
            return await reply
        finally:
            if reply.done() and not reply.cancelled() and reply.exception() is None:
                self.give(connection)
            else:
                connection.close()

    def give(self, connection: Connection) -> None:
        if connection.usable:
            self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def request_bytes(
    address: Address,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
) -> bytes:
    """Build a whole request; a body is JSON unless a header says otherwise."""
    lines = [f"{method} {address.path}{path} HTTP/1.1", f"Host: {address.authority}"]
    said = {"Content-Type": "application/json", "Content-Length": str(len(body))} if body else {}
    lines += [f"{name}: {value}" for name, value in (said | (headers or {})).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def fetch(
    address: Address,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] | None = None,
    timeout: float = 30.0,
) -> tuple[int, bytes]:
    """Make one request on its own connection; return (status, body) or raise `ConnectionLost`."""
    connection = await Connection.open(address, timeout)
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(timeout):
            reply = await connection.send(
                request_bytes(address, method, path, body, headers),
                lambda _when, data: parts.append(data),
            )
    except TimeoutError:
        raise ConnectionLost(f"no answer from {address.authority} in {timeout:g} s") from None
    finally:
        connection.close()
    return reply.status, b"".join(parts)

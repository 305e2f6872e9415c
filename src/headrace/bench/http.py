"""HTTP/1.1 for load generation: one connection, one request at a time, bytes stamped on arrival.

A client library timestamps a chunk after parsing and buffering; here `data_received` reads the
clock first, then llhttp parses.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from ..base.errors import InvalidRequest

OnBody = Callable[[int, bytes], None]
"""Called with (monotonic nanoseconds, bytes of the body) as they come."""

MAX_HEAD = 64 * 1024
"""Most bytes before a body, and most bytes of header names and values."""


class ConnectionLost(Exception):
    """Error: the server closed, refused or broke the protocol."""

    stale = False
    """Whether a kept connection was closed before any answer to the request, so that it may be sent
    again on a new one (RFC 9110, 9.2.2; curl and browsers do it)."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a server."""

    host: str
    port: int
    tls: bool
    path: str
    """Prefix of all paths, without a final slash."""

    @property
    def authority(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def local(self) -> bool:
        """Whether the host is this machine, so that its counters are the server's."""
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
    """Status line, headers and end time of the answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    end_ns: int = 0


class Connection(asyncio.Protocol):
    """A keep-alive connection; `on_…` are the parser's callbacks."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Reply | None = None
        self._headers: dict[str, str] = {}
        self._named = 0
        """Bytes of names and values of the headers."""
        self._on_body: OnBody = lambda _when, _data: None
        self._done: asyncio.Future[Reply] | None = None
        self._now = self._before = 0
        """Time of the latest bytes; number of bytes before the headers were complete."""
        self._served = 0
        """Requests answered on this connection."""
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
        self._parser = httptools.HttpResponseParser(self)
        self._reply, self._headers = None, {}
        self._before = self._named = 0
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
        self._now = time.monotonic_ns()
        if self._done is None or self._done.done():
            self.close()  # Bytes without a request.
            return
        if self._reply is None:
            self._before += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("broken HTTP from the server: another protocol")
        except httptools.HttpParserError as error:
            self._fail(f"broken HTTP from the server: {error.__context__ or error}")
        else:
            if self._reply is None and self._before > MAX_HEAD:
                self._fail("broken HTTP from the server: headers without end")

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._done is None or self._done.done():
            return
        sized = {"content-length", "transfer-encoding"} & self._headers.keys()
        if self._reply is not None and not sized:
            self._finish(time.monotonic_ns())
            return
        what = "before it answered" if self._reply is None else "in the middle of an answer"
        stale = self._served > 0 and not self._before
        self._fail(f"the server closed the connection {what}", stale=stale)

    def on_message_begin(self) -> None:
        if self._reply is not None:
            raise ValueError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named += len(name) + len(value)
        if self._named > MAX_HEAD:
            raise ValueError("headers without end")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}  # An interim answer.
        else:
            self._reply = Reply(status, self._headers)

    def on_body(self, data: bytes) -> None:
        self._on_body(self._now, data)

    def on_message_complete(self) -> None:
        if self._reply is not None:
            self._finish(self._now, keep=self._parser.should_keep_alive())

    def _finish(self, now: int, *, keep: bool = False) -> None:
        assert self._reply is not None
        assert self._done is not None
        self._reply.end_ns = now
        self._served += 1
        if not keep:
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

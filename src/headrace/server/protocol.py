"""Bounded connections: limits on headers, on silence and on their number.

uvicorn's protocol accepts headers of any size. It waits for ever for a client that sends nothing,
half its headers or half a body, or does not read its answer (ADR 0051). This class ends each of
these, and answers invalid HTTP in the format of every other error. It serves requests that ask for
another protocol, with their body (`Upgrade: h2c`, Java's default client). It reserves a few
connections for probes.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..base.encodings import MOST_INPUTS
from ..base.errors import HeadraceError, InvalidRequest, Overloaded
from .authentication import HEALTH
from .errors import error_body, error_headers
from .wire import encode

if TYPE_CHECKING:
    from .meter import HttpMeter

log = logging.getLogger("headrace.server")

MAX_HEAD = 64 * 1024
"""Bytes of a request's line and headers, and of the framing around its chunks."""
HEAD_SECONDS = 15.0
"""Seconds in which the headers must be complete, from the connection or from their first byte."""
BODY_SECONDS = 30.0
"""Seconds in which a body must be complete, plus one for each `BODY_RATE` bytes of it."""
BODY_RATE = 16 * 1024
STALL_SECONDS = 60.0
"""Seconds after which a client that takes no byte of its answer is disconnected."""
MAX_CONNECTIONS = 8192
SPARE_FILES = MOST_INPUTS + 128
"""File descriptors that connections leave free for everything else, a quarter of all at most."""
PROBE_CONNECTIONS = 16
"""Connections above the limit, for probes only: a full server still reports that it lives."""
PROBE_SECONDS = 2.0
"""Seconds in which the headers on such a connection must be complete."""
_PROBES = frozenset(path.encode() for path in HEALTH)
SOCKETS = frozenset({b"/v1/realtime", b"/v1/cameras"})
"""Paths that serve a websocket."""
SOCKET_BYTES = 2**20
"""Largest message of a client, in bytes: 16 seconds of 24 kHz in base64, a picture of a camera."""
_UPGRADES = (b"upgrade", b"http2-settings", b"connection")

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


class MalformedRequest(InvalidRequest):
    code = "malformed_http"


class HeadTooLarge(InvalidRequest):
    status = 431
    code = "head_too_large"


class TooManyConnections(Overloaded):
    code = "too_many_connections"


class RequestTimeout(HeadraceError):
    """Failure: the client did not finish its request in time."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


def most_connections() -> int:
    """Return the maximum number of connections, raising the limit of open files as far as
    allowed."""
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    want = MAX_CONNECTIONS + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < want:
        new = want if hard == resource.RLIM_INFINITY else min(want, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
            soft = new
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(16, min(MAX_CONNECTIONS, soft - min(SPARE_FILES, soft // 4)))


class ChunkOutlet:
    """Outlet for parts of one answer's body, past the layers around the routes
    (`frames.Outlet`)."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def open(self) -> bool:
        """Whether a body of unknown length is under way, to a client that keeps up."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not cycle.flow.write_paused
            and not cycle.response_complete
            and not cycle.disconnected
        )

    def write(self, data: bytes) -> None:
        """Send a part, as `RequestResponseCycle.send` does."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Its limits are class attributes, so that tests can lower them."""

    head_seconds = HEAD_SECONDS
    body_seconds = BODY_SECONDS
    stall_seconds = STALL_SECONDS
    max_connections = MAX_CONNECTIONS
    meter: HttpMeter | None = None
    """Counter of the connections that end at a limit."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._fed = 0
        """Bytes since the message began, without the piece in which it began."""
        self._body = 0
        self._deadline = 0.0
        self._began = False
        self._complete = True
        """Whether no message is partly received."""
        self._refusal: HeadraceError | None = None
        self._cycles: list[RequestResponseCycle] = []
        self._spare = False
        """Whether this is one of the connections for probes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.max_connections
        if len(self.connections) <= most:
            self._arm(self.head_seconds)
            return
        self._spare = True
        if len(self.connections) > most + PROBE_CONNECTIONS and not self._make_room():
            self._refuse(self._too_many())
            return
        self._arm(min(PROBE_SECONDS, self.head_seconds))

    def _make_room(self) -> bool:
        """Close another probe connection that has sent no request yet."""
        for other in self.connections:
            if isinstance(other, BoundedProtocol) and other.silent and other is not self:
                other._refuse(self._too_many())
                return True
        return False

    @property
    def silent(self) -> bool:
        """Whether this is a probe connection whose request has not arrived."""
        return self._spare and not self._cycles and not self.transport.is_closing()

    def _too_many(self) -> TooManyConnections:
        return TooManyConnections(
            f"{self.max_connections} connections are open, which is the limit"
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unstall()
        # uvicorn notifies only the newest of several requests on one connection.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._arm(self.head_seconds)
        self._began = False
        self._feed(data)
        self._fed = 0 if self._began else self._fed + len(data)
        if not self._complete and self._fed > MAX_HEAD + 16 * self._body:
            self._refuse(_head_too_large())

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._to_websocket():
                self._disarm()
                self.scope["method"] = "GET"
                self.handle_websocket_upgrade()
                return
            # No other protocol is supported: the request is treated as HTTP/1.1 (RFC 9110, 7.8).
            # httptools stops at headers with Upgrade, so a new parser gets them without it.
            head = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
            head += [
                b"%b: %b" % (name, value) for name, value in self.headers if name not in _UPGRADES
            ]
            rest = data[upgrade.args[0] :]
            self.parser = httptools.HttpRequestParser(self)
            # As in uvicorn, for clients that send more after asking to close.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(b"\r\n".join(head) + b"\r\n\r\n" + rest)
        except httptools.HttpParserError:
            self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._began, self._complete, self._body = True, False, 0

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEAD:
            self._refusal = _head_too_large()
            raise ValueError("the head is too large")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._refusal = MalformedRequest("a request has exactly one Host header")
            raise ValueError("not one host")
        if self._upgrades():
            return
        if self._spare and self.url.partition(b"?")[0] not in _PROBES:
            self._refusal = self._too_many()
            raise ValueError("not a probe")
        super().on_headers_complete()
        self.scope["headrace.outlet"] = ChunkOutlet(self.cycle)  # type: ignore[typeddict-unknown-key]
        if self._spare:
            self.cycle.keep_alive = False
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        self._deadline = self.loop.time() + self.body_seconds
        self._arm(self.body_seconds)

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def _to_websocket(self) -> bool:
        """Whether the headers request a websocket that is available here."""
        return (
            self.parser.get_method() == b"GET"
            and self.url.partition(b"?")[0] in SOCKETS
            and not self._spare
            and all(cycle.response_complete for cycle in self._cycles)
            and self._should_upgrade()
        )

    def _upgrades(self) -> bool:
        """Whether `_feed` will parse these headers again without the request to upgrade."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_complete(self) -> None:
        if self._upgrades():
            return
        self._complete = True
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP; uvicorn calls this."""
        self._refuse(self._refusal or MalformedRequest("this is no valid HTTP/1.1 request"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unstall()
        self._unsent = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.stall_seconds, self._stalled)

    def resume_writing(self) -> None:
        self._unstall()
        super().resume_writing()

    def shutdown(self) -> None:
        self._disarm()
        super().shutdown()

    def _arm(self, seconds: float) -> None:
        self._disarm()
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unstall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _late(self) -> None:
        """Handle a timeout of the headers, or of the body so far."""
        self._timer = None
        if self.transport.is_closing():
            return
        in_body = self._in_body()
        if in_body:
            left = self._deadline + self._body / BODY_RATE - self.loop.time()
            if left > 0:
                self._arm(left)
                return
        if self._complete:  # It sent nothing, so nothing is answered.
            self.transport.close()
            return
        if in_body and self.cycle.response_complete:  # Already refused.
            self.transport.close()
            return
        what = "body" if in_body else "head"
        self._refuse(RequestTimeout(f"the request's {what} was not complete in time"))

    def _stalled(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent < self._unsent:
            self._unsent = unsent
            self._stall = self.loop.call_later(self.stall_seconds, self._stalled)
            return
        log.info("a client that reads nothing was left", extra={"unsent": unsent})
        if self.meter is not None:
            self.meter.failed("reader_stalled")
        self.transport.abort()

    def _in_body(self) -> bool:
        """Whether a request's body is incomplete."""
        return not self._complete and self.cycle is not None and self.cycle.more_body

    def _refuse(self, error: HeadraceError) -> None:
        """Answer, unless an earlier request's answer is still under way; then close."""
        if self.transport.is_closing():
            return
        if self.meter is not None:
            self.meter.refused(error)
        own: RequestResponseCycle | None = self.cycle if self._in_body() else None
        busy = any(
            not cycle.response_complete and (cycle is not own or cycle.response_started)
            for cycle in self._cycles
        )
        if not busy:
            body = encode(error_body(error))
            head = [b"HTTP/1.1 %d %b" % (error.status, _REASONS[error.status])]
            head += [
                f"{name}: {value}".encode()
                for name, value in {
                    "content-type": "application/json",
                    "content-length": str(len(body)),
                    "connection": "close",
                    **error_headers(error),
                }.items()
            ]
            self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        self.transport.close()


def _head_too_large() -> HeadTooLarge:
    return HeadTooLarge(f"the request's head is larger than {MAX_HEAD} bytes")


__all__ = ["BoundedProtocol", "most_connections"]

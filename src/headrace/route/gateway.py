"""The gateway: one address before several servers.

A request's body is read whole, within a bound, so that it can be sent again; an answer is passed on
as it comes. Until the first byte of an answer a lost or full replica costs the client nothing but
time; after it, a stream of chat or completions goes on elsewhere (`resume`). Only routes whose
answers depend on the request alone are passed on. No body is logged.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.types import Receive, Scope, Send

from ..base.errors import HeadraceError, NotFound, Overloaded, TooLarge
from ..base.foreign import Undecodable, json_reader
from ..base.text_prefixes import NOTHING, PATHS, secret_of, text_prefixes
from ..engine.routing import Prompted, Router
from ..server.errors import MethodNotAllowed, error_body, error_headers
from ..server.paths import Paths
from ..server.refusal import last_frame
from ..server.wire import encode
from .replica import Replica
from .resume import MOST_KEPT, Resume
from .upstream import Headers, ReplicaLost, Upstream

log = logging.getLogger("headrace.route")

GENERATING = ("/v1/chat/completions", "/v1/completions")
"""Routes whose streams are migrated."""
ROUTED = {
    **dict.fromkeys(GENERATING, "POST"),
    "/v1/messages": "POST",
    "/v1/embeddings": "POST",
    "/v1/rerank": "POST",
    "/v1/score": "POST",
    "/v1/audio/transcriptions": "POST",
    "/v1/audio/translations": "POST",
    "/v1/audio/speech": "POST",
    "/v1/models": "GET",
}
"""Routes that any replica answers alike, and their method."""
HEALTH = ("/health", "/v1/health/ready", "/v1/health/live")
TRIES = 3
"""Replicas that one request is sent to before its first byte."""
MIGRATIONS = 2
"""Replicas' deaths that one stream survives: a request that kills what it meets ends here."""
ELSEWHERE = (502, 503, 504)
"""Statuses for which another replica is asked."""
MAX_BODY = 32 * 2**20
_OWN = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding",
    b"upgrade", b"http2-settings", b"proxy-authorization", b"expect",
})  # fmt: skip
"""Headers of one connection, which are not passed on (RFC 9110, 7.6.1)."""

_LEFT_OUT = _OWN | {b"host", b"content-length"}


class _Body(msgspec.Struct):
    """What the gateway reads of a body, beside its prompt."""

    seed: int | None = None
    stream: bool | None = None


_generating = json_reader(_Body)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as replicas get it."""

    path: str
    head: bytes
    """Its first line and headers, but for the host's."""
    body: bytes
    prefixes: Sequence[int]
    """Names of the beginnings of its prompt."""
    migrates: bool

    def to(self, replica: Replica) -> bytes:
        return b"%bhost: %b\r\ncontent-length: %d\r\n\r\n%b" % (
            self.head,
            replica.host,
            len(self.body),
            self.body,
        )


class Gateway:
    """An ASGI application over replicas."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        *,
        migrate: bool = True,
        max_body: int = MAX_BODY,
    ) -> None:
        """`migrate`: streams of a dead replica go on elsewhere; a request without a seed gets one
        for that. `max_body`: bytes of a request's body."""
        self.replicas = replicas
        self._router = router
        self._migrate = migrate
        self._max_body = max_body
        self.draining = False
        self._registry = CollectorRegistry()
        self._counts = {
            name: Counter(f"headrace_route_{name}", text, ["replica"], registry=self._registry)
            for name, text in (
                ("requests", "Requests that a replica was given."),
                ("lost", "Exchanges that ended with the connection to the replica."),
                ("migrations", "Streams that went on at this replica."),
            )
        }
        self._counters = {
            (name, one.number): counter.labels(one.url)
            for name, counter in self._counts.items()
            for one in replicas
        }
        self._registry.register(self)
        self._paths = Paths(self._serve)

    def collect(self) -> list[GaugeMetricFamily]:
        """The gauges, as prometheus_client asks for them."""
        outstanding = GaugeMetricFamily(
            "headrace_route_outstanding", "Requests that have not ended.", labels=["replica"]
        )
        ready = GaugeMetricFamily(
            "headrace_route_ready", "1: the replica may be chosen.", labels=["replica"]
        )
        tells = GaugeMetricFamily(
            "headrace_route_tells", "1: it tells what its cache holds.", labels=["replica"]
        )
        for one in self.replicas:
            tells.add_metric([one.url], float(one.tells))
            outstanding.add_metric([one.url], one.outstanding)
            ready.add_metric([one.url], float(one.may_be_chosen))
        return [outstanding, ready, tells]

    def count(self, what: str, replica: Replica) -> None:
        """Count a request, a lost one or a migration of a replica's."""
        self._counters[what, replica.number].inc()

    @property
    def ready(self) -> bool:
        """New requests are taken."""
        return not self.draining and any(one.may_be_chosen for one in self.replicas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._paths(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        exchange = _Exchange(path, send)
        try:
            if path in HEALTH:
                await self._health(path, send)
            elif path == "/metrics":
                await _reply(send, 200, generate_latest(self._registry), b"text/plain")
            else:
                asked = await self._read(scope, receive)
                if asked is not None:
                    await self._while_connected(receive, self._pass(asked, exchange))
        except HeadraceError as error:
            await exchange.end_with(error)

    async def _health(self, path: str, send: Send) -> None:
        lives = path.endswith("/live")
        word = "live" if lives else "ready" if self.ready else "not ready"
        body = {"object": "health.response", "status": word, "message": word}
        await _reply(send, 200 if lives or self.ready else 503, encode(body), b"application/json")

    async def _read(self, scope: Scope, receive: Receive) -> Asked | None:
        """The request; None where its client left before its end. Raises `HeadraceError`."""
        path = scope["path"]
        method = ROUTED.get(path)
        if method is None:
            raise NotFound(
                f"{path} is not routed; what keeps state in one server is asked of that server",
                code="route_not_found",
            )
        if scope["method"] != method:
            raise MethodNotAllowed(f"{path} takes {method}, not {scope['method']}")
        parts, size = [], 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            if size > self._max_body:
                raise TooLarge(f"the body is larger than {self._max_body} bytes")
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        head = b"%b %b HTTP/1.1\r\n" % (method.encode(), path.encode() + query)
        head += b"".join(
            b"%b: %b\r\n" % (name, value)
            for name, value in scope["headers"]
            if name not in _LEFT_OUT
        )
        migrates, prefixes = False, NOTHING
        if path in PATHS:
            prefixes = text_prefixes(body, secret_of(scope["headers"]))
        if path in GENERATING:
            try:
                read = _generating(body)
            except Undecodable:
                read = _Body()  # What is wrong with it the replica says.
            migrates = self._migrate and bool(read.stream)
            start = body.find(b"{") + 1
            if migrates and read.seed is None and b'"seed"' not in body and start:
                seed = random.getrandbits(31)
                body = b'%b"seed":%d,%b' % (body[:start], seed, body[start:])
            elif migrates and read.seed is None:
                migrates = False
        return Asked(path, head, body, prefixes.keys, migrates)

    async def _while_connected(self, receive: Receive, work: Awaitable[None]) -> None:
        """Do the work unless the client leaves: then the replica's connection ends with it."""
        working = asyncio.current_task()
        assert working is not None
        left = False

        async def watch() -> None:
            nonlocal left
            while (await receive())["type"] != "http.disconnect":
                pass
            left = True
            working.cancel()

        watcher = asyncio.ensure_future(watch())
        try:
            await work
        except asyncio.CancelledError:
            if not left:
                raise
            working.uncancel()
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})

    def choose(self, asked: Prompted, barred: Collection[int]) -> Replica:
        """The replica for a request, none of those with these numbers. Raises `Overloaded`."""
        able = [one for one in self.replicas if one.may_be_chosen and one.number not in barred]
        if not able:
            raise Overloaded("no server is ready for this request", retry_after=1)
        able = [one for one in able if not one.prefills] or able
        return self._router.choose(asked, able)

    async def _pass(self, asked: Asked, exchange: _Exchange) -> None:
        """Have the request answered, by several replicas if need be."""
        tried: set[int] = set()
        resume: Resume | None = None
        deaths = 0
        while True:
            replica = self.choose(asked, tried)
            tried.add(replica.number)
            last = len(tried) >= TRIES and resume is None
            with replica.taken():
                self.count("requests", replica)
                connection: Upstream | None = None
                try:
                    connection = await replica.ask(asked.to(replica))
                    status = connection.status
                    refused = status != 200 if resume else status in ELSEWHERE and not last
                    if refused and self._others(tried):
                        continue
                    replica.succeeded()
                    if resume is not None:
                        if refused:
                            raise ReplicaLost("no other server continued the stream")
                        self.count("migrations", replica)
                    await exchange.relay(connection, asked.migrates, resume)
                    return
                except ReplicaLost:
                    replica.failed()
                    self.count("lost", replica)
                    if not exchange.begun:
                        if last or not self._others(tried):
                            raise
                        continue
                    deaths += 1
                    if not exchange.resumable or deaths > MIGRATIONS or not self._others(tried):
                        raise
                    log.warning("a stream goes on elsewhere", extra={"lost": replica.url})
                    resume = Resume(bytes(exchange.sent))
                finally:
                    if connection is not None:
                        replica.connections.give_back(connection)

    def _others(self, tried: set[int]) -> bool:
        return any(one.may_be_chosen and one.number not in tried for one in self.replicas)


class _Exchange:
    """What one client has been sent."""

    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._streams = False
        self.begun = False
        self.sent = bytearray()
        """The events of a stream that can be migrated."""
        self.resumable = False

    async def relay(self, connection: Upstream, migrates: bool, resume: Resume | None) -> None:
        """Pass an answer on as it comes. Raises `ReplicaLost` and `Diverged`."""
        if not self.begun:
            kinds = [v for name, v in connection.headers if name == b"content-type"]
            self._streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
            self.resumable = self._streams and migrates and connection.status == 200
            first = await connection.part()
            await self._begin(connection.status, connection.headers)
        else:
            first = await connection.part()
        rest = b""
        data = first
        while data:
            if self.resumable:
                rest += data
                end = rest.rfind(b"\n\n") + 2
                data, rest = (rest[:end], rest[end:]) if end > 1 else (b"", rest)
                if _died(data):
                    raise ReplicaLost("the replica's engine died within its answer")
                if resume is not None:
                    data = b"".join(resume.news(event) for event in data.split(b"\n\n"))
                self._keep(data)
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.part()
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    def _keep(self, data: bytes) -> None:
        self.sent += data
        if len(self.sent) > MOST_KEPT:
            self.resumable = False
            self.sent.clear()

    async def _begin(self, status: int, headers: Headers) -> None:
        self.begun = True
        kept = [(name, value) for name, value in headers if name not in _OWN]
        if self.resumable:  # Another replica's framing may follow.
            kept = [pair for pair in kept if pair[0] != b"content-length"]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def end_with(self, error: HeadraceError) -> None:
        """The error as the answer, or as the end of the answer that has begun."""
        if not self.begun:
            headers = [(k.encode(), v.encode()) for k, v in error_headers(error).items()]
            body = encode(error_body(error))
            await _reply(self._send, error.status, body, b"application/json", headers)
        elif self._streams:
            body = last_frame(self._path, error)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        else:
            raise error  # uvicorn closes the connection: the body is seen to be cut.


def _died(events: bytes) -> bool:
    """Is one of these events the word that the engine behind the replica is dead?"""
    return b'data: {"error":' in events and b'"engine_dead"' in events


async def _reply(
    send: Send, status: int, body: bytes, kind: bytes, more: Headers | None = None
) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *(more or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

"""The gateway: one address before several servers.

A request's body is read whole, so that it can be sent again. It is bounded by its own size, its
client's share and a total. An answer is passed on as it arrives. Until the first byte of an answer,
a lost or full replica costs the client only time. After it, a stream of chat or completions
continues on another replica (`resume`). Only routes whose answers depend on the request alone are
forwarded. No body is logged. The server's layers are around it: names, origins, request ids,
counts.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import random
import time
from collections.abc import Collection, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import Headers as HeaderView
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from ..base.errors import HeadraceError, NotFound, Overloaded, TooLarge, Unauthorised
from ..base.text_prefixes import TextPrefixes, secret_of
from ..engine.simulator.routing import Prompted, Router
from ..obs.loopwatch import LoopWatch
from ..obs.tasks import TaskWatch
from ..server.body import BodiesInFlight
from ..server.border import Border
from ..server.caller import BODY_SIZE, CALLER, Caller
from ..server.connection import while_connected
from ..server.errors import MethodNotAllowed, error_body, error_headers
from ..server.hands import Hands
from ..server.hosts import Hosts
from ..server.meter import HttpMeter
from ..server.origin import Origins
from ..server.paths import Paths
from ..server.refusal import last_frame
from ..server.wire import encode
from . import status
from .asked import (
    FORMS,
    HEALTH,
    MAX_BODY,
    MOST_FORM,
    ROUTED,
    Asked,
    Switches,
    head_of,
    looked,
    of_connection,
    owner_of,
)
from .meters import RouteMeter
from .replica import Replica
from .resume import MOST_EVENT, MOST_KEPT, Resume
from .sources import ServerSource
from .upstream import Headers, ReplicaLost, ReplicaSilent, Upstream

log = logging.getLogger("headrace.route")

_ROUTES = {path: SimpleNamespace(path=path) for path in (*ROUTED, *HEALTH, "/", "/metrics")}
"""Route names under which exchanges are counted; their number is bounded."""
TRIES = 3
"""Replicas that one request is sent to before its first byte."""
MIGRATIONS = 2
"""Replica deaths that one stream survives: a request that kills replicas ends here."""
ELSEWHERE = (502, 503, 504)
"""Statuses after which another replica is tried."""
MOST_SENT = 256 * 2**20
"""Bytes of the events kept for migrations, over all streams."""
ROOM = 4096
"""Bytes of them for which room is taken at a time."""
ANSWER_SECONDS = 600.0
"""Maximum seconds of silence of a replica. Our servers begin a stream within 15 s and never pause
longer. A response that is not streamed is silent until complete, and clients wait ten minutes for
it."""


class Gateway:
    """An ASGI application over replicas."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        router: Router,
        *,
        migrate: bool = True,
        max_body: int = MAX_BODY,
        answer_seconds: float = ANSWER_SECONDS,
        key: str = "",
        hosts: frozenset[str] = frozenset(),
        origins: frozenset[str] = frozenset(),
    ) -> None:
        """Create the gateway over replicas.

        `migrate`: continue streams of a dead replica on another one; requests without a seed get
        one. `max_body`: bytes of a request's body, except for forms of sound. `answer_seconds`:
        longest silence of a replica. `key`: an operator's key, if the replicas require keys. It
        also protects this gateway's metrics, and host names are then not checked by default.
        `hosts`: names of the gateway in addition to addresses and local names. `origins`: other
        origins whose pages may use it.
        """
        self.max_body = max_body
        self._router = router
        self._migrate = migrate
        self._seconds = answer_seconds
        self._key = key
        self.draining = False
        self.meter = HttpMeter()
        self.tasks = TaskWatch(lambda name: self.meter.failed("habit"))
        """Probes, and readers of the replicas' reports."""
        self.loop = LoopWatch(on_beat=self.meter.late)
        self.hands = Hands()
        self.bodies = BodiesInFlight()
        """Bodies of this port and of the picker's."""
        self._sent = BodiesInFlight(MOST_SENT)
        self.replicas: list[Replica] = []
        """Replicas that requests go to; sources may name others while the gateway runs."""
        self.sources: list[ServerSource] = []
        """Sources of replicas that may join and leave, as the status shows them."""
        self.times = RouteMeter(self.meter.registry, self.replicas)
        for one in replicas:
            self.admit(one)
        layers: ASGIApp = Origins(Paths(self._serve), origins, self.meter.refused)
        if hosts or not key:
            layers = Hosts(layers, hosts, self.meter.refused)
        self._layers = Border(layers, self, self.meter)

    def admit(self, replica: Replica) -> None:
        """Send requests to this replica too."""
        self.replicas.append(replica)
        self.times.admit(replica)

    def dismiss(self, replica: Replica) -> None:
        """Forget a replica without requests in work."""
        self.replicas.remove(replica)
        self.times.dismiss(replica)
        replica.connections.abort()

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return not self.draining and any(one.may_be_chosen for one in self.replicas)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._layers(scope, receive, send)

    def leave(self, scope: MutableMapping[str, Any]) -> None:
        """Release the bytes that this scope's exchange holds."""
        self.bodies.give(scope)

    def close(self) -> None:
        """Stop all background work; exchanges go on."""
        self.loop.stop()
        self.hands.close()
        for replica in self.replicas:
            replica.connections.abort()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        scope["route"] = _ROUTES.get(path)
        CALLER.set(Caller(owner=owner_of(scope)))
        exchange = _Exchange(path, send, self._sent)
        try:
            if path in HEALTH:
                await self._health(path, send)
            elif path == "/metrics":
                self._check_operator(scope)
                # With a thousand servers this computes for a second: not in the event loop.
                text = await asyncio.to_thread(self._metrics)
                await _reply(send, 200, text, CONTENT_TYPE_PLAIN_0_0_4.encode())
            elif path == "/":
                await self._say_about(scope, send)
            else:
                body = await self._read(scope, receive)
                await while_connected(receive, self._answer(scope, body, exchange))
        except HeadraceError as error:
            self.meter.refused(error)
            await exchange.end_with(error)
        finally:
            exchange.close()

    async def _health(self, path: str, send: Send) -> None:
        lives = path.endswith("/live")
        word = "live" if lives else "ready" if self.ready else "not ready"
        body = {"object": "health.response", "status": word, "message": word}
        await _reply(send, 200 if lives or self.ready else 503, encode(body), b"application/json")

    def _check_operator(self, scope: Scope) -> None:
        """Raise `Unauthorised` if there is a key and the request lacks it."""
        shown = _key_in(secret_of(scope["headers"]))
        if self._key and not hmac.compare_digest(shown, self._key.encode()):
            raise Unauthorised("this route needs the operator's key of --key-file")

    def _metrics(self) -> bytes:
        meter = self.meter
        meter.draining.set(self.draining)
        meter.in_work.set(sum(one.outstanding for one in self.replicas))
        meter.longest_hold.set(self.loop.longest)
        return generate_latest(meter.registry)

    async def _say_about(self, scope: Scope, send: Send) -> None:
        """Describe the gateway as JSON, or as a page for browsers. If there is a key, only a
        request with it gets the replicas."""
        shown = True
        try:
            self._check_operator(scope)
        except Unauthorised:
            shown = False
        if b"text/html" not in dict(scope["headers"]).get(b"accept", b""):
            about = status.described(self, shown)
            await _reply(send, 200, encode(about), b"application/json")
        elif shown:
            page = await asyncio.to_thread(status.page_of, self)
            await _reply(send, 200, page, status.KIND, list(status.SAFE))
        else:  # A browser asks its user for the key, as the password of any name.
            asks = [(b"www-authenticate", b'Basic realm="the key of --key-file, as password"')]
            body = encode(error_body(Unauthorised("the list of servers needs the operator's key")))
            await _reply(send, 401, body, b"application/json", asks)

    async def _read(self, scope: Scope, receive: Receive) -> bytearray:
        """Read the body. Raises `HeadraceError`, and `ClientDisconnect` if the client left before
        its end."""
        path = scope["path"]
        method = ROUTED.get(path)
        if method is None:
            raise NotFound(
                f"there is no {path[:200]} here; files, batches and stored responses are asked of "
                "the server that has them, and / lists what a gateway passes on",
                code="route_not_found",
            )
        if scope["method"] != method:
            raise MethodNotAllowed(f"{path} takes {method}, not {scope['method']}")
        most = self.max_body
        if path in FORMS:
            most = max(most, MOST_FORM)
        announced = HeaderView(scope=scope).get("content-length", "")
        if announced.isdigit() and int(announced) > most:
            raise _too_large(most)
        body = bytearray()
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            if len(body) + len(part) > most:
                raise _too_large(most)
            self.bodies.take(scope, len(part))
            body += part
            more = message.get("more_body", False)
        return body

    async def look(
        self, path: str, body: bytes | bytearray, headers: Headers
    ) -> tuple[TextPrefixes, Switches]:
        """Read a body as far as choosing a replica needs, off the event loop unless it is small.

        Raises `Overloaded`.
        """
        BODY_SIZE.set(len(body))
        return await self.hands.beside(looked, path, body, secret_of(headers))

    async def _answer(self, scope: Scope, body: bytearray, exchange: _Exchange) -> None:
        path, headers = scope["path"], scope["headers"]
        names, read = await self.look(path, body, headers)
        migrates = self._migrate and bool(read.stream)
        if migrates and read.seed is None:
            # Appended at the end: of two fields with one name the last one counts.
            end = body.rindex(b"}")
            body[end:end] = b',"seed":%d' % random.getrandbits(31)
        await self._pass(Asked(path, head_of(scope), body, names.keys, migrates), exchange)

    def choose(self, asked: Prompted, barred: Collection[int]) -> Replica:
        """Choose a replica for a request, except those barred. Raises `Overloaded`."""
        able = [one for one in self.replicas if one.may_be_chosen and one.number not in barred]
        if not able:
            raise Overloaded("no server is ready for this request", retry_after=1)
        able = [one for one in able if not one.prefills] or able
        return self._router.choose(asked, able)

    async def _pass(self, asked: Asked, exchange: _Exchange) -> None:
        """Have the request answered, trying several replicas if necessary."""
        tried: set[int] = set()
        resume: Resume | None = None
        deaths = 0
        while True:
            replica = self.choose(asked, tried)
            tried.add(replica.number)
            last = len(tried) >= TRIES and resume is None
            with replica.taken():
                self.times.count("requests", replica)
                connection: Upstream | None = None
                try:
                    begin = time.perf_counter()
                    connection = await replica.ask(
                        asked.to(replica), asked.body, seconds=self._seconds
                    )
                    self.times.took("first_byte", replica, time.perf_counter() - begin)
                    code = connection.status
                    self.times.answered(replica, code)
                    refused = code != 200 if resume else code in ELSEWHERE and not last
                    if refused and self._others(tried):
                        continue
                    replica.succeeded()
                    if resume is not None:
                        if refused:
                            raise ReplicaLost("no other server continued the stream")
                        self.times.count("migrations", replica)
                    await exchange.relay(connection, asked.migrates, resume)
                    if code < 400:
                        self.times.took("first_part", replica, exchange.first - begin)
                        self.times.took("pause", replica, exchange.pause)
                        self.times.took("answer", replica, time.perf_counter() - begin)
                    return
                except ReplicaLost as lost:
                    replica.failed()
                    self.times.count("lost", replica)
                    if not exchange.begun:
                        # If a replica was silent for so long, the request is not tried on another.
                        if last or isinstance(lost, ReplicaSilent) or not self._others(tried):
                            raise
                        continue
                    deaths += 1
                    if not exchange.resumable or deaths > MIGRATIONS or not self._others(tried):
                        raise
                    log.warning("a stream goes on elsewhere", extra={"lost": replica.url})
                    # Off the event loop: up to 8 MiB of events are read again.
                    resume = await self.hands.run(Resume, bytes(exchange.sent))
                finally:
                    if connection is not None:
                        replica.connections.give_back(connection)

    def _others(self, tried: set[int]) -> bool:
        return any(one.may_be_chosen and one.number not in tried for one in self.replicas)


def _key_in(secret: bytes) -> bytes:
    """Return the key of an `Authorization` header: after `Bearer`, or the password of `Basic`."""
    kind, _, given = secret.rpartition(b" ")
    if kind.lower() != b"basic":
        return given
    try:
        return base64.b64decode(given, validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the body is larger than the {most} bytes that are allowed (--max-body)")


class _Exchange:
    """Part of an answer that one client has already received."""

    def __init__(self, path: str, send: Send, kept: BodiesInFlight) -> None:
        """Create the state of an answer. `kept` bounds the events of all streams."""
        self._path = path
        self._send = send
        self._streams = False
        self._all = kept
        self._held: dict[str, Any] = {}
        self._room = 0
        """Bytes of `sent` for which room was taken."""
        self.begun = False
        self.sent = bytearray()
        """Events of a stream that can be migrated."""
        self.resumable = False
        self.first = self.pause = 0.0
        """Clock at the body's first part, and the longest wait in seconds for a later one."""

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
        self.first, self.pause = time.perf_counter(), 0.0
        rest = b""
        data = first
        while data:
            if self.resumable or resume is not None:
                rest += data
                end = rest.rfind(b"\n\n") + 2
                data, rest = (rest[:end], rest[end:]) if end > 1 else (b"", rest)
                if _died(data):
                    raise ReplicaLost("the replica's engine died within its answer")
                if resume is not None:
                    data = b"".join(resume.news(event) for event in data.split(b"\n\n"))
                self._keep(data)
                if len(rest) > MOST_EVENT:
                    if resume is not None:
                        raise ReplicaLost("the replica's event does not end")
                    self._forget()
                if not self.resumable and resume is None:  # From now on parts pass as they come.
                    data, rest = data + rest, b""
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            asked = time.perf_counter()
            data = await connection.part()
            self.pause = max(self.pause, time.perf_counter() - asked)
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    def _keep(self, data: bytes) -> None:
        """Keep sent events for a migration, as long as there is room."""
        if not self.resumable:
            return
        self.sent += data
        lacking = len(self.sent) - self._room
        try:
            if lacking > 0:  # In larger steps, because each take costs 2 µs.
                self._all.take(self._held, max(lacking, ROOM))
                self._room += max(lacking, ROOM)
        except Overloaded:
            self._forget()
        if len(self.sent) > MOST_KEPT:
            self._forget()

    def _forget(self) -> None:
        """Give up on migrating this stream."""
        self.resumable = False
        self.close()

    def close(self) -> None:
        """Release the kept events."""
        self.sent.clear()
        self._room = 0
        self._all.give(self._held)

    async def _begin(self, status: int, headers: Headers) -> None:
        self.begun = True
        own = of_connection(headers)
        kept = [(name, value) for name, value in headers if name not in own]
        if self.resumable:  # Another replica may continue it.
            kept = [pair for pair in kept if pair[0] != b"content-length"]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})

    async def end_with(self, error: HeadraceError) -> None:
        """Send the error as the answer, or as the end of the answer that has begun."""
        if not self.begun:
            headers = [(k.encode(), v.encode()) for k, v in error_headers(error).items()]
            body = encode(error_body(error))
            await _reply(self._send, error.status, body, b"application/json", headers)
        elif self._streams:
            body = last_frame(self._path, error)
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        # Otherwise send nothing: uvicorn closes the connection, and the client sees a cut body.


def _died(events: bytes) -> bool:
    """Check whether one of these events says that the replica's engine is dead."""
    return b'data: {"error":' in events and b'"engine_dead"' in events


async def _reply(
    send: Send, status: int, body: bytes, kind: bytes, more: Headers | None = None
) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *(more or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

"""The gateway: one address before several servers.

A request's body is read whole, so that it can be sent again. It is bounded by its own size, its
client's share and a total. An answer is passed on as it arrives. Until the first byte of an answer,
a lost or full replica costs the client only time. After it, a stream of chat or completions
continues on another replica (`resume`). Only routes whose answers depend on the request alone are
forwarded. No body is logged. The server's layers are around it: names, origins, request ids,
counts.
"""

from __future__ import annotations

import hmac
import logging
import random
import time
from collections.abc import Collection, MutableMapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from prometheus_client import Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import Headers as HeaderView
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from ..base.errors import HeadraceError, NotFound, Overloaded, TooLarge, Unauthorised
from ..base.text_prefixes import TextPrefixes, secret_of
from ..base.version import VERSION
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
from ..server.meter import SECONDS, HttpMeter
from ..server.origin import Origins
from ..server.paths import Paths
from ..server.refusal import last_frame
from ..server.wire import encode
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
from .replica import Replica
from .resume import MOST_EVENT, MOST_KEPT, Resume
from .upstream import Headers, ReplicaLost, ReplicaSilent, Upstream

log = logging.getLogger("headrace.route")

_ROUTES = {path: SimpleNamespace(path=path) for path in (*ROUTED, *HEALTH, "/", "/metrics")}
"""Route names under which exchanges are counted; their number is bounded."""
TRIES = 3
"""Replicas that one request is sent to before its first byte."""
MIGRATIONS = 2
"""Replica deaths that one stream survives: a request that kills replicas ends here."""
ELSEWHERE = (502, 503, 504)
"""Statuses after which another replica is asked."""
MOST_SENT = 256 * 2**20
"""Bytes of the events kept for migrations, over all streams."""
ROOM = 4096
"""Bytes of them for which room is taken at a time."""
ANSWER_SECONDS = 600.0
"""Longest silence of a replica in seconds. Our servers begin a stream within 15 s and never pause
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
        self.replicas = replicas
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
        registry = self.meter.registry
        self._counts = {
            name: Counter(f"headrace_route_{name}", text, ["replica"], registry=registry)
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
        begun = Histogram(
            "headrace_route_first_byte_seconds",
            "Seconds from a request to the first byte of the replica's answer.",
            ["replica"],
            buckets=SECONDS,
            registry=registry,
        )
        self._begun = {one.number: begun.labels(one.url) for one in replicas}
        registry.register(self)
        layers: ASGIApp = Origins(Paths(self._serve), origins, self.meter.refused)
        if hosts or not key:
            layers = Hosts(layers, hosts, self.meter.refused)
        self._layers = Border(layers, self, self.meter)

    def collect(self) -> list[GaugeMetricFamily]:
        """Return the gauges for prometheus_client."""
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
        """Count a request, a lost exchange or a migration of a replica."""
        self._counters[what, replica.number].inc()

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
                await _reply(send, 200, self._metrics(), CONTENT_TYPE_PLAIN_0_0_4.encode())
            elif path == "/":
                await _reply(send, 200, encode(self._about(scope)), b"application/json")
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
        shown = secret_of(scope["headers"]).rpartition(b" ")[2]
        if self._key and not hmac.compare_digest(shown, self._key.encode()):
            raise Unauthorised("this route needs the operator's key of --key-file")

    def _metrics(self) -> bytes:
        meter = self.meter
        meter.draining.set(self.draining)
        meter.in_work.set(sum(one.outstanding for one in self.replicas))
        meter.longest_hold.set(self.loop.longest)
        return generate_latest(meter.registry)

    def _about(self, scope: Scope) -> dict[str, Any]:
        """Describe the gateway. If there is a key, only its holders see the replicas."""
        about: dict[str, Any] = {
            "object": "gateway",
            "message": "a gateway before servers that speak OpenAI's interface",
            "version": VERSION,
            "status": "ready" if self.ready else "not ready",
            "routes": [f"{method} {path}" for path, method in ROUTED.items()],
        }
        with suppress(Unauthorised):
            self._check_operator(scope)
            about["replicas"] = [
                {
                    "url": one.url,
                    "state": one.state,
                    "outstanding": one.outstanding,
                    "reports_its_cache": one.tells,
                    "only_prompts": one.prefills,
                }
                for one in self.replicas
            ]
        return about

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
            # At its end: of two fields with one name the last one counts.
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
                self.count("requests", replica)
                connection: Upstream | None = None
                try:
                    begin = time.perf_counter()
                    connection = await replica.ask(
                        asked.to(replica), asked.body, seconds=self._seconds
                    )
                    self._begun[replica.number].observe(time.perf_counter() - begin)
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
                except ReplicaLost as lost:
                    replica.failed()
                    self.count("lost", replica)
                    if not exchange.begun:
                        # A request on which one replica was silent for so long is not tried on
                        # another.
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
                    data, rest = data + rest, b""
            if data:
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            data = await connection.part()
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    def _keep(self, data: bytes) -> None:
        """Keep sent events for a migration, as long as there is room."""
        if not self.resumable:
            return
        self.sent += data
        lacking = len(self.sent) - self._room
        try:
            if lacking > 0:  # In steps: each take costs 2 µs.
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

"""The gateway: one address before several servers.

A request's body is read whole, within bounds (its own, its client's share, and one over all), so
that it can be sent again; an answer is passed on as it comes. Until the first byte of an answer a
lost or full replica costs the client nothing but time; after it, a stream of chat or completions
goes on elsewhere (`resume`). Only routes whose answers depend on the request alone are passed on.
No body is logged. Layers of the server are around it: names, origins, request ids, counts.
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
from ..engine.routing import Prompted, Router
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
"""Names under which exchanges are counted: a bounded number."""
TRIES = 3
"""Replicas that one request is sent to before its first byte."""
MIGRATIONS = 2
"""Replicas' deaths that one stream survives: a request that kills what it meets ends here."""
ELSEWHERE = (502, 503, 504)
"""Statuses for which another replica is asked."""
MOST_SENT = 256 * 2**20
"""Bytes of the events that are kept for migrations, of all streams."""
ANSWER_SECONDS = 600.0
"""Longest silence of a replica. Our servers begin a stream within 15 s and never pause longer; an
answer that is not streamed says nothing until it is done, and clients wait ten minutes for it."""


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
        """`migrate`: streams of a dead replica go on elsewhere; a request without a seed gets one
        for that. `max_body`: bytes of a request's body, but for forms of sound. `answer_seconds`:
        longest silence of a replica. `key`: an operator's key of the replicas, where they ask for
        keys: then it opens this gateway's metrics, too, and a name proves nothing. `hosts`: names
        that the gateway has in addition to addresses and local names. `origins`: other origins
        whose pages may use it."""
        self.replicas = replicas
        self.max_body = max_body
        self._router = router
        self._migrate = migrate
        self._seconds = answer_seconds
        self._key = key
        self.draining = False
        self.meter = HttpMeter()
        self.tasks = TaskWatch(lambda name: self.meter.failed("habit"))
        """Probes, and what follows the replicas' reports."""
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
        await self._layers(scope, receive, send)

    def leave(self, scope: MutableMapping[str, Any]) -> None:
        """The exchange of this scope has ended."""
        self.bodies.give(scope)

    def close(self) -> None:
        """End all that was begun, but for exchanges."""
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
        """Raise `Unauthorised` where there is a key and the request does not show it."""
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
        """Describe the gateway; where there is a key, its replicas only to those who show it."""
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
        """Read the body. Raises `HeadraceError`, and `ClientDisconnect` where its client left
        before its end."""
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
        """Read a body as far as a choice needs it, beside the event loop where it is not small.

        Raises `Overloaded`.
        """
        BODY_SIZE.set(len(body))
        return await self.hands.beside(looked, path, body, secret_of(headers))

    async def _answer(self, scope: Scope, body: bytearray, exchange: _Exchange) -> None:
        path, headers = scope["path"], scope["headers"]
        names, read = await self.look(path, body, headers)
        migrates = self._migrate and bool(read.stream)
        if migrates and read.seed is None:
            # At its end: of two members of one name the last counts.
            end = body.rindex(b"}")
            body[end:end] = b',"seed":%d' % random.getrandbits(31)
        await self._pass(Asked(path, head_of(scope), body, names.keys, migrates), exchange)

    def choose(self, asked: Prompted, barred: Collection[int]) -> Replica:
        """Choose the replica of a request, none of those barred. Raises `Overloaded`."""
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
                        # What one took so long over is not begun at another.
                        if last or isinstance(lost, ReplicaSilent) or not self._others(tried):
                            raise
                        continue
                    deaths += 1
                    if not exchange.resumable or deaths > MIGRATIONS or not self._others(tried):
                        raise
                    log.warning("a stream goes on elsewhere", extra={"lost": replica.url})
                    # Beside the loop: up to 8 MiB of events are read again.
                    resume = await self.hands.run(Resume, bytes(exchange.sent))
                finally:
                    if connection is not None:
                        replica.connections.give_back(connection)

    def _others(self, tried: set[int]) -> bool:
        return any(one.may_be_chosen and one.number not in tried for one in self.replicas)


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the body is larger than the {most} bytes that are allowed (--max-body)")


class _Exchange:
    """The part of an answer that one client has been sent."""

    def __init__(self, path: str, send: Send, kept: BodiesInFlight) -> None:
        """`kept`: bounds the events of all streams."""
        self._path = path
        self._send = send
        self._streams = False
        self._all = kept
        self._held: dict[str, Any] = {}
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
        """Keep what was sent for a migration, as long as there is room."""
        if not self.resumable:
            return
        try:
            self._all.take(self._held, len(data))
        except Overloaded:
            self._forget()
            return
        self.sent += data
        if len(self.sent) > MOST_KEPT:
            self._forget()

    def _forget(self) -> None:
        """Give a migration up."""
        self.resumable = False
        self.close()

    def close(self) -> None:
        """Give back the room of what was kept."""
        self.sent.clear()
        self._all.give(self._held)

    async def _begin(self, status: int, headers: Headers) -> None:
        self.begun = True
        own = of_connection(headers)
        kept = [(name, value) for name, value in headers if name not in own]
        if self.resumable:  # Another replica's framing may follow.
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
        # Else nothing: uvicorn closes the connection, and the body is seen to be cut.


def _died(events: bytes) -> bool:
    """Find out whether one of these events says that the replica's engine is dead."""
    return b'data: {"error":' in events and b'"engine_dead"' in events


async def _reply(
    send: Send, status: int, body: bytes, kind: bytes, more: Headers | None = None
) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *(more or ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})

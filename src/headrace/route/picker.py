"""The endpoint picker: another gateway forwards the requests and asks which server gets each.

Envoy, or any speaker of its external processing, opens a gRPC stream per request and sends headers
and body. The answer names an endpoint, chosen by the same policy from the same replicas as our own
gateway's (Gateway API Inference Extension, proposal 004). The stream lasts as long as the exchange,
so a request counts until its stream ends, however it ends. Messages are bounded. Bodies are bounded
in bytes, in time, and in total together with those of the gateway's port; none is logged. Anything
large is parsed off the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.errors import HeadraceError, OptionError, TooLarge
from ..base.extras import needed
from ..base.protobuf import MalformedMessage
from ..server.caller import BODY_SIZE, CALLER, Caller
from ..server.errors import error_body, error_headers
from ..server.grpc_tls import Certificates
from ..server.paths import versioned
from ..server.protocol import BODY_RATE, BODY_SECONDS
from ..server.wire import encode
from . import ext_proc
from .envoy_messages import new
from .ext_proc import BodyMode, Part, Processing
from .gateway import ELSEWHERE, Gateway
from .replica import Replica

log = logging.getLogger("headrace.route")

KEEPALIVE_MS = 20_000
"""Silence of a gateway after which it is pinged; without an answer its requests end."""
HEALTH_SERVICES = ("", "liveness", "readiness", ext_proc.SERVICE)
SERVING, NOT_SERVING = 1, 2


class BodyLate(HeadraceError):
    """Refusal of a request whose body did not arrive whole in time."""

    status = 408
    type = "invalid_request_error"
    code = "body_late"


@dataclass(frozen=True, slots=True)
class _Beginnings:
    prefixes: Sequence[int]


class Picked:
    """One exchange of another gateway: its request so far, and the replica chosen for it."""

    def __init__(self, picker: Picker) -> None:
        self._picker = picker
        self._modes = BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED
        """Body modes: the protocol's, unless Envoy names others."""
        self._headers: list[tuple[bytes, bytes]] = []
        self._subset: frozenset[str] | None = None
        self._body = bytearray()
        self._held: dict[str, Any] = {}
        """Bytes charged for its unfinished body."""
        self._counted = ExitStack()
        self.replica: Replica | None = None
        """Replica that gets the request, or None until the request is whole."""

    @property
    def seconds(self) -> float | None:
        """Seconds from its start in which the request must be whole, or None once it is."""
        return None if self.replica is not None else BODY_SECONDS + len(self._body) / BODY_RATE

    def close(self) -> None:
        """End the exchange: it no longer counts."""
        self._drop()
        self._counted.close()

    async def answers(self, message: Processing) -> list[bytes]:
        """Answer one message. Raises `HeadraceError`, which then is the answer."""
        part = message.part
        if message.modes is not None:
            self._modes = message.modes
        if part in (Part.RESPONSE_HEADERS, Part.RESPONSE_BODY, Part.RESPONSE_TRAILERS):
            return self._answered(message)
        if self.replica is not None:
            if part is Part.REQUEST_HEADERS or self._modes[0] is BodyMode.FULL_DUPLEX_STREAMED:
                raise MalformedMessage("the request goes on after its end")
            return [ext_proc.nothing_changed(part)]
        if part is Part.REQUEST_HEADERS:
            self._headers, self._subset = message.headers, message.subset
        elif part is Part.REQUEST_BODY:
            self._keep(message.body)
        if self._modes[0] is BodyMode.FULL_DUPLEX_STREAMED:
            return await self._duplex(message)
        at_headers = message.ends or self._modes[0] in (BodyMode.NONE, BodyMode.STREAMED)
        if part is Part.REQUEST_BODY or (part is Part.REQUEST_HEADERS and at_headers):
            return [ext_proc.chosen(part, await self._choose())]
        return [ext_proc.nothing_changed(part)]

    async def _duplex(self, message: Processing) -> list[bytes]:
        """Answer nothing until the request is whole; then answer headers, body and trailers in
        turn."""
        if not message.ends and message.part is not Part.REQUEST_TRAILERS:
            return []
        body = bytes(self._body)
        replies = [ext_proc.chosen(Part.REQUEST_HEADERS, await self._choose())]
        if message.part is not Part.REQUEST_HEADERS:
            replies += ext_proc.given_back(
                Part.REQUEST_BODY, body, message.part is Part.REQUEST_BODY
            )
        if message.part is Part.REQUEST_TRAILERS:
            replies.append(ext_proc.nothing_changed(message.part))
        return replies

    def _keep(self, piece: bytes) -> None:
        gateway = self._picker.gateway
        if len(self._body) + len(piece) > gateway.max_body:
            raise TooLarge(f"the body is larger than {gateway.max_body} bytes")
        gateway.bodies.take(self._held, len(piece))
        self._body += piece

    def _drop(self) -> None:
        self._picker.gateway.bodies.give(self._held)
        self._body = bytearray()

    async def _choose(self) -> str:
        """Choose the endpoint; from now on the request counts. Raises `Overloaded`."""
        path = dict(self._headers).get(b":path", b"").decode(errors="replace")
        path = versioned(path.partition("?")[0])
        names, _ = await self._picker.gateway.look(path, self._body, self._headers)
        self._drop()
        gateway, subset = self._picker.gateway, self._subset
        barred = {
            one.number
            for one in gateway.replicas
            if not one.address or (subset is not None and one.address not in subset)
        }
        self.replica = gateway.choose(_Beginnings(names.keys), barred)
        self._counted.enter_context(self.replica.taken())
        gateway.times.count("requests", self.replica)
        return self.replica.address

    def _answered(self, message: Processing) -> list[bytes]:
        part = message.part
        if part is Part.RESPONSE_HEADERS and self.replica is not None:
            status = dict(message.headers).get(b":status", b"")
            if status in _ELSEWHERE:  # Envoy reports a lost connection as 503.
                self.replica.failed()
                self._picker.gateway.times.count("lost", self.replica)
            else:
                self.replica.succeeded()
        if part is Part.RESPONSE_BODY and self._modes[1] is BodyMode.FULL_DUPLEX_STREAMED:
            return [*ext_proc.given_back(part, message.body, message.ends)]
        return [ext_proc.nothing_changed(part)]


_ELSEWHERE = frozenset(b"%d" % status for status in ELSEWHERE)


class Picker:
    """gRPC services: external processing, and health as Kubernetes queries it."""

    def __init__(self, gateway: Gateway) -> None:
        """Prepare the services. Raises `PackageAbsent` if gRPC or protobuf is not installed."""
        self.gateway = gateway
        self._grpc = needed("grpc", "endpoint pickers", "picker")
        new("ProcessingResponse")  # Otherwise the first request would find protobuf missing.
        self._server: Any = None
        self.port = 0
        """Port on which it listens."""

    async def start(
        self, address: str, tls: Path | None = None, clients: Path | None = None
    ) -> None:
        """Listen at `HOST:PORT`.

        `tls`: a folder with `tls.crt` and `tls.key`, as Kubernetes mounts them. `clients`: the CA
        that must have signed the clients' certificates. Raises `OptionError`.
        """
        grpc = self._grpc
        host, _, number = address.rpartition(":")
        if not host or not number.isdecimal():
            raise OptionError("endpoint_picker must be HOST:PORT", param="endpoint_picker")
        if clients is not None and tls is None:
            raise OptionError(
                "endpoint_picker_clients needs endpoint_picker_tls", param="endpoint_picker_clients"
            )
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # Otherwise two pickers on one port both seem to listen.
                ("grpc.max_receive_message_length", ext_proc.MOST_MESSAGE),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
                ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # Otherwise a minute.
                ("grpc.http2.max_pings_without_data", 0),
            )
        )
        process = grpc.stream_stream_rpc_method_handler(self._process)
        check = grpc.unary_unary_rpc_method_handler(self._check)
        generic = grpc.method_handlers_generic_handler
        server.add_generic_rpc_handlers((
            generic(ext_proc.SERVICE, {"Process": process}),
            generic("grpc.health.v1.Health", {"Check": check}),
        ))  # fmt: skip
        fault = f"cannot listen at {address}"
        try:
            if tls is None:
                self.port = server.add_insecure_port(address)
            else:
                keys = tls / "tls.key", tls / "tls.crt"
                credentials = Certificates(grpc, *keys, clients).credentials()
                self.port = server.add_secure_port(address, credentials)
        except OSError as error:
            fault = f"cannot read {error.filename}"
        except RuntimeError:
            pass  # Older versions return 0.
        if not self.port:
            await server.stop(None)
            del server  # It must end in the loop that created it.
            raise OptionError(fault, param="endpoint_picker")
        await server.start()
        self._server = server

    async def stop(self, seconds: float) -> None:
        """Take no new request; after `seconds` end the remaining ones."""
        if self._server is not None:
            await self._server.stop(seconds)

    async def _process(self, _requests: Any, context: Any) -> None:
        CALLER.set(Caller(owner=context.peer().rpartition(":")[0]))
        exchange = Picked(self)
        begin = asyncio.get_running_loop().time()
        try:
            while True:
                try:
                    seconds = exchange.seconds
                    async with asyncio.timeout_at(None if seconds is None else begin + seconds):
                        data = await context.read()
                    if data is self._grpc.aio.EOF:
                        return
                    BODY_SIZE.set(len(data))
                    message = await self.gateway.hands.beside(ext_proc.read, data)
                    if message.observes:
                        return  # A gateway that only observes ignores the choice.
                    replies, last = await exchange.answers(message), False
                except TimeoutError:
                    replies, last = (
                        [_refusal(BodyLate("the request's body did not come whole in time"))],
                        True,
                    )
                except MalformedMessage as error:
                    await context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, error.message)
                except HeadraceError as error:
                    replies, last = [_refusal(error)], True
                for one in replies:
                    await context.write(one)
                if last:
                    return
        finally:
            exchange.close()

    async def _check(self, data: bytes, context: Any) -> bytes:
        """Answer a health check: `liveness` is this process; every other service means that
        requests are accepted."""
        try:
            service = ext_proc.asked_health(data)
        except MalformedMessage as error:
            await context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, error.message)
        if service not in HEALTH_SERVICES:
            await context.abort(self._grpc.StatusCode.NOT_FOUND, "no service of this name")
        serves = service == "liveness" or self.gateway.ready
        return ext_proc.health(SERVING if serves else NOT_SERVING)


def _refusal(error: HeadraceError) -> bytes:
    headers = {"content-type": "application/json", **error_headers(error)}
    return ext_proc.refused(
        error.status, headers, encode(error_body(error)), f"headrace_{error.code}"
    )

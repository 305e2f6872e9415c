"""KServe v2 over gRPC: each call is shown to the application as an HTTP exchange.

So the ids, logs, metrics, keys, quotas and bounds of the routes apply, and none can be forgotten. A
caller is authenticated before its message is read. Incomplete messages are bounded in size, number
and time. A call that is cancelled or past its deadline counts as a client disconnect: its work is
dropped before its next run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from ..base.errors import HeadraceError, OptionError
from ..base.extras import needed
from ..base.foreign import Undecodable, any_json
from ..base.protobuf import MalformedMessage
from ..base.shares import Shares
from .access import log_exchange
from .authentication import account_of
from .body import IN_FLIGHT
from .caller import BODY_SIZE, CALLER, Caller, caller_of
from .grpc_tls import Certificates
from .inference_messages import (
    SERVICE,
    TYPES,
    infer_response,
    model_path,
    read_call,
    read_named,
    stream_response,
)
from .inside import Answer, exchange_scope
from .protocol import (
    BODY_RATE,
    BODY_SECONDS,
    HEAD_SECONDS,
    MAX_HEAD,
    RequestTimeout,
    most_connections,
)
from .tensors import LENGTH_HEADER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from .accounts import Account, Accounts
    from .app import Application

Write = Callable[[Answer], Awaitable[None]]
"""Sends an answer with status 200, while its bytes are still counted as held."""
SILENT_SECONDS = 300.0
"""Seconds without a request after which a stream ends."""
PING_MS = 20_000
"""Silence of a client after which it is pinged; if it does not answer, its calls end."""
LEAST_PLACES = 4
MOST_TIMEOUT = 10**12
PASSED = frozenset(
    {"authorization", "origin", "sec-fetch-site", "traceparent", "tracestate", "x-api-key",
     "x-request-id"}
)  # fmt: skip
"""Metadata that become headers."""
STATUS = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    405: "UNIMPLEMENTED", 408: "DEADLINE_EXCEEDED", 413: "RESOURCE_EXHAUSTED",
    429: "RESOURCE_EXHAUSTED", 499: "CANCELLED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
"""Status of HTTP → code of gRPC; others below 500 are INVALID_ARGUMENT, from 500 on INTERNAL."""
PROBES = {"ServerLive": "/v2/health/live", "ServerReady": "/v2/health/ready"}


class GrpcCall:
    """One call, with the data that its exchange needs."""

    def __init__(self, context: Any) -> None:
        self.context = context
        given = [(str(name), value) for name, value in context.invocation_metadata() or ()]
        self.headers = [
            (name.encode(), value.encode("latin-1", "replace"))
            for name, value in given
            if name in PASSED and isinstance(value, str)
        ]
        self.gone = asyncio.Event()
        self.account: Account | None = None
        # Without keys, calls count by address, and one address may have half of all.
        self.owner = str(context.peer()).rpartition(":")[0]

    def identify(self, accounts: Accounts | None) -> None:
        """Authenticate the caller. Raises `Unauthorised`."""
        if accounts is not None:
            scope = {"type": "http", "path": "/v2", "headers": self.headers}
            self.account = account_of(accounts, scope)
            self.owner = self.account.key.name
            CALLER.set(caller_of(self.account))
        else:
            CALLER.set(Caller(owner=self.owner))


class GrpcPort:
    """The gRPC service of one server."""

    def __init__(self, app: Application) -> None:
        """Prepare the service of an application. Raises `PackageAbsent`."""
        self.app = app
        self._service = app.state.service
        self._grpc = needed("grpc", "KServe v2 over gRPC", "picker", param="grpc_port")
        TYPES.new("Truth")  # Otherwise the first call would find protobuf missing.
        self._server: Any = None
        options = self._service.options
        self._most = options.max_body + MAX_HEAD
        """Bytes of a message."""
        places = max(LEAST_PLACES, IN_FLIGHT // self._most)
        self._places = Shares(places, "as many calls are being read as are allowed")
        self._calls = Shares(2 * options.max_concurrent, "as many calls are open as are allowed")
        """Calls of any kind: gRPC cannot end one whose client does not read."""
        self._unread = Shares(IN_FLIGHT // 2, "clients have not read as many bytes as are allowed")
        """Bytes of answers that clients have not read."""
        self.address = ""

    async def start(self) -> None:
        """Listen. Raises `OptionError`."""
        grpc, options = self._grpc, self._service.options
        most = min(2**31 - 1, self._most)
        server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # Otherwise two servers on one port both seem to listen.
                ("grpc.max_receive_message_length", most),
                ("grpc.max_metadata_size", MAX_HEAD),
                ("grpc.absolute_max_metadata_size", MAX_HEAD),
                ("grpc.server_handshake_timeout_ms", int(HEAD_SECONDS * 1000)),
                ("grpc.max_allowed_incoming_connections", most_connections() // 4),
                ("grpc.max_concurrent_streams", options.max_concurrent),
                ("grpc.http2.bdp_probe", 0),  # Otherwise windows grow to megabytes.
                ("grpc.keepalive_time_ms", PING_MS),
                ("grpc.keepalive_timeout_ms", PING_MS),
                ("grpc.http2.ping_timeout_ms", PING_MS),  # Otherwise a minute.
                ("grpc.http2.max_pings_without_data", 0),
            ),
            maximum_concurrent_rpcs=2 * options.max_concurrent,
        )
        # Each method is a stream to gRPC, so that its caller is known before its message is read.
        handler = grpc.stream_stream_rpc_method_handler
        about = self._about
        methods = {
            "ModelInfer": self._infer,
            "ModelStreamInfer": self._stream,
            "ModelReady": about("/ready", "Truth", named=True),
            "ModelMetadata": about("", "ModelMetadataResponse", named=True),
            "ServerMetadata": about("/v2", "ServerMetadataResponse"),
            "RepositoryIndex": about("/v2/repository/index", "RepositoryIndexResponse", "models"),
            **{name: about(path, "Truth") for name, path in PROBES.items()},
        }
        handlers = {name: handler(self._served(name, work)) for name, work in methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = await self._bound(server)
        await server.start()
        self._server = server

    async def _bound(self, server: Any) -> str:
        """Bind the port; return its address. Raises `OptionError`."""
        options, port = self._service.options, 0
        host = f"[{options.host}]" if ":" in options.host else options.host
        fault = f"cannot listen at {host}:{options.grpc_port}"
        try:
            if options.tls_cert is None:
                port = server.add_insecure_port(f"{host}:{options.grpc_port}")
            else:
                clients = Path(options.tls_clients) if options.tls_clients else None
                keys = Path(options.tls_key), Path(options.tls_cert)
                credentials = Certificates(self._grpc, *keys, clients).credentials()
                port = server.add_secure_port(f"{host}:{options.grpc_port}", credentials)
        except OSError as error:
            fault = f"cannot read {error.filename}: {error.strerror}"
        except RuntimeError:
            pass  # Older versions return 0.
        if not port:
            await server.stop(None)
            raise OptionError(fault, param="grpc_port")
        return f"{host}:{port}"

    async def stop(self, seconds: float) -> None:
        """Take no new calls; after `seconds` end those in work."""
        if self._server is not None:
            await self._server.stop(seconds)

    # Calls

    def _served(self, name: str, work: Callable[[GrpcCall], Awaitable[None]]) -> Any:
        async def served(_requests: Any, context: Any) -> None:
            begin, scope = time.perf_counter(), dict[str, Any]()
            try:
                call = GrpcCall(context)
                if name not in PROBES:  # Those need no key.
                    call.identify(self.app.state.accounts)
                scope["headrace.account"] = call.account
                self._calls.take(call.owner, 1)
                try:
                    await work(call)
                finally:
                    self._calls.give(call.owner, 1)
            except HeadraceError as error:
                self._note(scope, error, begin)
                await self._abort(context, error.status, error)

        return served

    def _note(self, scope: dict[str, Any], error: HeadraceError, begin: float) -> None:
        """Count and log a call refused before its exchange began."""
        self.app.state.meter.refused(error)
        seconds = round(time.perf_counter() - begin, 6)
        extra = {"path": f"/{SERVICE}", "status": error.status, "seconds": seconds}
        log_exchange(logging.INFO, extra, {**scope, "headrace.error": error})

    async def _abort(self, context: Any, status: int, error: HeadraceError) -> None:
        code = STATUS.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
        metadata = [("headrace-code", error.code)] if error.code else []
        if error.retry_after is not None:
            metadata.append(("retry-after", f"{error.retry_after:.0f}"))
        await context.abort(getattr(self._grpc.StatusCode, code), error.message, tuple(metadata))

    def _about(
        self, path: str, kind: str, field: str = "", *, named: bool = False
    ) -> Callable[[GrpcCall], Awaitable[None]]:
        """Return a method that answers with a route's JSON, or with whether its status is 200.
        `field`: field that the JSON, a list, fills; `named`: `path` follows the path of the model
        that the message names."""

        async def about(call: GrpcCall) -> None:
            model = model_path(*read_named(await self._message(call))) if named else ""
            answer = await self._exchange(call, "POST" if field else "GET", model + path)
            if answer.status != 200 and not (kind == "Truth" and answer.status in (404, 503)):
                await self._abort(call.context, answer.status, _error(answer))
            found: Any = {"truth": answer.status == 200}
            if kind != "Truth":
                found = any_json(answer.body)
            message = TYPES.filled(kind, {field: found} if field else found)
            await self._write(call, message.SerializeToString())

        return about

    async def _infer(self, call: GrpcCall) -> None:
        async def write(answer: Answer) -> None:
            message = await self._message_of(answer)
            await self._write(call, message.SerializeToString())

        answer = await self._inferred(call, await self._message(call), write)
        if answer.status != 200:
            await self._abort(call.context, answer.status, _error(answer))

    async def _stream(self, call: GrpcCall) -> None:
        """Answer the requests of a stream in their order, each with its result or its error."""

        async def write(answer: Answer) -> None:
            await self._write(call, stream_response(await self._message_of(answer)))

        while (data := await self._message(call, SILENT_SECONDS)) is not None:
            begin = time.perf_counter()
            try:
                answer = await self._inferred(call, data, write)
            except HeadraceError as error:
                self._note({"headrace.account": call.account}, error, begin)
                await self._write(call, stream_response(None, error.message))
                continue
            if answer.status in (401, 403):
                await self._abort(call.context, answer.status, _error(answer))
            elif answer.status != 200:
                name = answer.headers.get(_ID, "")
                await self._write(call, stream_response(None, _error(answer).message, name))

    async def _inferred(self, call: GrpcCall, data: bytes, write: Write) -> Answer:
        """Run a program on a request."""
        BODY_SIZE.set(len(data))
        inference = await self._service.hands.beside(read_call, data)
        left = call.context.time_remaining()
        # gRPC reports a missing deadline as one that is centuries away.
        most = None if left is None or left * 1e6 > MOST_TIMEOUT else max(1, int(left * 1e6))
        pieces, length = inference.pieces(most)
        headers = [
            (b"content-type", b"application/octet-stream"),
            (LENGTH_HEADER.lower().encode(), str(length).encode()),
        ]
        del data
        answer = await self._exchange(call, "POST", inference.path, pieces, headers, write)
        answer.headers[_ID] = inference.id
        return answer

    async def _message_of(self, answer: Answer) -> Any:
        BODY_SIZE.set(len(answer.body))
        return await self._service.hands.beside(infer_response, answer.headers, answer.body)

    # Messages

    async def _message(self, call: GrpcCall, silent: float = 0.0) -> Any:
        """Read a message; return None at the stream's end. `silent`: maximum seconds that the
        client may take to send it. Raises `Overloaded`, `RequestTimeout`, `MalformedMessage`."""
        seconds = silent or BODY_SECONDS + self._most / BODY_RATE
        self._places.take(call.owner, 1)
        try:
            async with asyncio.timeout(seconds):
                data = await call.context.read()
        except TimeoutError:
            raise RequestTimeout(f"no message came within {seconds:.0f} s") from None
        finally:
            self._places.give(call.owner, 1)
        if data is self._grpc.aio.EOF:
            if silent:
                return None
            raise MalformedMessage("the call ended without a message")
        return data

    async def _write(self, call: GrpcCall, data: bytes) -> None:
        """Send a message of an answer. gRPC cannot end a call whose client does not read, so such
        messages are bounded in bytes. Raises `Overloaded`."""
        self._unread.take(call.owner, len(data))
        try:
            await call.context.write(data)
        finally:
            self._unread.give(call.owner, len(data))

    async def _exchange(
        self,
        call: GrpcCall,
        method: str,
        path: str,
        pieces: list[bytes] | None = None,
        headers: list[tuple[bytes, bytes]] | None = None,
        write: Write | None = None,
    ) -> Answer:
        """Present a call to the application as an exchange; return the answer. `write` first
        gets an answer with status 200; its errors are raised. A cancelled call is a disconnect."""
        answer, left, failed = Answer(), pieces or [b""], list[Exception]()
        app: ASGIApp = self.app
        given = [(b"host", b"localhost"), *call.headers, *(headers or [])]
        scope = exchange_scope(method, path, given, http_version="2", server=None)

        async def receive() -> Message:
            if left:
                body = left.pop(0)
                return {"type": "http.request", "body": body, "more_body": bool(left)}
            await call.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer.begin(message)
                return
            answer.body += message.get("body", b"")
            whole = not message.get("more_body", False)
            if whole and write is not None and answer.status == 200 and not call.gone.is_set():
                try:
                    await write(answer)
                except Exception as error:
                    failed.append(error)
                    raise ClientDisconnect from error

        work = asyncio.ensure_future(app(scope, receive, send))
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            call.gone.set()
            await asyncio.wait({work})
            raise
        if failed:
            raise failed[0]
        return answer


_ID = "id"
"""Key under which an answer has the request's id."""


def _error(answer: Answer) -> HeadraceError:
    """Return the error of an answer, in the form of KServe v2 or in OpenAI's."""
    fields: Mapping[str, Any] = {}
    with suppress(Undecodable):
        fields = any_json(answer.body)
    if isinstance(fields.get("error"), dict):
        fields = {**fields["error"], "error": fields["error"].get("message")}
    error = HeadraceError(str(fields.get("error") or f"status {answer.status}"))
    error.code = fields.get("code")
    wait = answer.headers.get("retry-after", "")
    error.retry_after = float(wait) if wait.isdecimal() else None
    return error

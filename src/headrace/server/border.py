"""Outermost layer: request ids, the access log, the last handler for bugs.

Written directly against ASGI (scope, receive, send) because it wraps every stream: a layer that
re-packs messages would cost more per token than the route does.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access import CLIENT_GONE, log_exchange
from .caller import begin_exchange
from .errors import error_response, internal_error

if TYPE_CHECKING:
    from .meter import HttpMeter

log = logging.getLogger("headrace.server")


def request_id(headers: Headers) -> str:
    """Return the caller's `x-request-id` if it is safe to log; otherwise a new one."""
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable() and " " not in given:
        return given
    return uuid.uuid4().hex


class Exchanges(Protocol):
    """Owner of the resources that an exchange holds: a service or a gateway."""

    draining: bool

    def leave(self, scope: MutableMapping[str, Any]) -> None: ...


class Border:
    """Outermost ASGI layer. It counts, names and logs every exchange; no exception escapes it."""

    def __init__(self, app: ASGIApp, service: Exchanges, meter: HttpMeter) -> None:
        self._app = app
        self._service = service
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_exchange()
        name = request_id(Headers(scope=scope))
        scope["headrace.request_id"] = name
        begin = time.perf_counter()
        status = 0

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = name
                if self._service.draining:
                    headers["connection"] = "close"
            await send(message)

        try:
            await self._app(scope, receive, numbered)
        except ClientDisconnect:
            status = CLIENT_GONE
        except Exception:
            log.exception("unexpected error", extra={"request_id": name})
            self._meter.failed("bug")
            if not status:
                await error_response(internal_error())(scope, receive, numbered)
        finally:
            self._service.leave(scope)
            seconds = time.perf_counter() - begin
            self._meter.exchange(_route(scope), scope["method"], status, seconds)
            # Probes and scrapes come every few seconds and would drown the log.
            level = logging.DEBUG if scope["method"] == "GET" and status < 400 else logging.INFO
            fields = {
                "request_id": name,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "seconds": round(seconds, 6),
            }
            log_exchange(level, fields, scope, begin)


def _route(scope: Scope) -> str:
    """Return the route's pattern instead of the path: the number of patterns is bounded."""
    route = scope.get("route")
    return getattr(route, "path", "unknown") if route is not None else "unknown"

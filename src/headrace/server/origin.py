"""What web pages of other origins may do: nothing, unless the operator lists their origin.

Reading answers across origins is what CORS opens, and only for the listed ones. Being *acted on*
is another matter: a browser sends a POST without a body, or with a form's, to any server without
asking first, so a page anywhere could drain or fill a server on its reader's own machine. Such
requests are told by `Sec-Fetch-Site`, or where that is missing by `Origin` and `Host` (the way of
Go's net/http.CrossOriginProtection), and refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..base.errors import Forbidden, HeadraceError, OptionError
from .refusal import refusal

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
MAX_AGE = 600
"""Seconds for which a browser may remember what it was allowed."""
EXPOSED = "x-request-id, retry-after"
_ORIGIN = re.compile(r"https?://[A-Za-z0-9._\-\[\]:]+")


class OriginNotAllowed(Forbidden):
    code = "origin_not_allowed"


def read_origins(text: str | None) -> frozenset[str]:
    """The origins of the option `cors_origins`. Raises `OptionError` naming the wrong one."""
    origins = [part.strip().rstrip("/").lower() for part in (text or "").split(",")]
    found = frozenset(origin for origin in origins if origin)
    for origin in sorted(found):
        if not _ORIGIN.fullmatch(origin):
            raise OptionError(
                f"cors_origins must list origins such as https://app.example.com, not "
                f"{origin[:100]!r}; there is no wildcard",
                param="cors_origins",
            )
    return found


class Origins:
    """ASGI layer around everything that does work."""

    def __init__(
        self, app: ASGIApp, allowed: frozenset[str], refused: Callable[[HeadraceError], None]
    ) -> None:
        self._app = app
        self._allowed = allowed
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "").lower()
        listed = origin in self._allowed
        if listed and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(origin, headers)(scope, receive, send)
            return
        # A websocket is read by whoever opened it: no rule of browsers guards its answers.
        acts = scope["method"] not in SAFE_METHODS or "headrace.socket" in scope
        if acts and not listed and _foreign(origin, headers):
            error = OriginNotAllowed(
                f"pages of {origin[:100] or 'another site'} may not use this server "
                "(option cors_origins)"
            )
            self._refused(error)
            await refusal(scope["path"], error)(scope, receive, send)
            return
        if not listed:
            await self._app(scope, receive, send)
            return

        async def opened(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                out["access-control-allow-origin"] = origin
                out["access-control-expose-headers"] = EXPOSED
                out.add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, opened)


def _foreign(origin: str, headers: Headers) -> bool:
    """Does a page of another origin send this?"""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    if not origin:
        return False  # No browser: they all send it with what is not safe.
    # By the text alone: a page may send what no parser takes.
    return origin.partition("://")[2] != headers.get("host", "").lower()


def _preflight(origin: str, headers: Headers) -> Response:
    wanted = headers.get("access-control-request-headers", "")[:2000]
    return Response(
        status_code=204,
        headers={
            "access-control-allow-origin": origin,
            "access-control-allow-methods": "GET, POST, DELETE",
            "access-control-allow-headers": wanted or "authorization, content-type",
            "access-control-max-age": str(MAX_AGE),
            "vary": "Origin",
        },
    )

"""Permissions of web pages from other origins: none, unless the operator lists their origin.

CORS opens the *reading* of answers across origins, only for the listed ones. *Actions* need their
own rule: a browser sends a POST without a body, or with a form, to any server without a preflight.
Any page could thus drain or fill a server on its reader's own machine. Such requests are recognised
by `Sec-Fetch-Site`, or if that is missing by `Origin` and `Host` (as in Go's
net/http.CrossOriginProtection), and refused.
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
"""Seconds for which a browser may cache a preflight's answer."""
EXPOSED = "x-request-id, retry-after"
_ORIGIN = re.compile(r"https?://[A-Za-z0-9._\-\[\]:]+")


class OriginNotAllowed(Forbidden):
    code = "origin_not_allowed"


def read_origins(text: str | None) -> frozenset[str]:
    """Return the origins of the option `cors_origins`. Raises `OptionError` naming the wrong
    one."""
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
    """ASGI layer around all routes with effects."""

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
        # No browser rule keeps a page from reading a websocket that it opened.
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
    """Whether a page of another origin sends this request."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    if not origin:
        return False  # Not a browser: browsers send it with all unsafe methods.
    # Compared as text: a page may send an origin that no parser accepts.
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

"""ASGI layer that gives each exchange its span; present only if traces are on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..obs.trace import CURRENT

if TYPE_CHECKING:
    from ..obs.spans import Spans


PATHS = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
    "/v1/rerank", "/v1/score", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/realtime",
})  # fmt: skip
"""Paths with spans: real work. Probes, scrapes and scans of random paths have none."""


def traced(app: ASGIApp, spans: Spans | None) -> ASGIApp:
    """Wrap the application if traces are on."""
    return app if spans is None else Traced(app, spans)


class Traced:
    """ASGI layer that creates an exchange's span, the parent of every request that it submits."""

    def __init__(self, app: ASGIApp, spans: Spans) -> None:
        self._app = app
        self._spans = spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        works = scope.get("method") == "POST" or "headrace.socket" in scope
        if scope["type"] != "http" or not works or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        span = self._spans.exchange(
            scope["method"], scope["path"], headers.get("traceparent"), headers.get("tracestate")
        )
        context = span.get_span_context()
        # For the access log's line (`obs.logs` puts them at its top level).
        scope["headrace.trace"] = {
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
        }
        token = CURRENT.set(span)
        status = 499

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = 500
            raise
        finally:
            CURRENT.reset(token)
            self._spans.answered(span, status)

"""Correction of paths from clients whose `base_url` lacks `/v1`.

The path is corrected before anything reads it (authentication, spans, routing), so a route has the
same key, limits and name under both paths. Only whole first segments of this list are changed.
Nothing is decoded or normalised, and no operator's route can be reached under another name.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"
WITHOUT = frozenset({"audio", "chat", "completions", "embeddings", "models", "responses"})
"""First segments of OpenAI's routes that belong below `/v1`."""


def versioned(path: str) -> str:
    """Return the corrected path."""
    return VERSION + path if path[1:].partition("/")[0] in WITHOUT else path


class Paths:
    """ASGI layer around all code that reads a path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"][1:].partition("/")[0] in WITHOUT:
            # In place: outer layers read the route's pattern and the usage from this scope.
            scope["path"] = VERSION + scope["path"]
            if "raw_path" in scope:
                scope["raw_path"] = VERSION.encode() + scope["raw_path"]
        await self._app(scope, receive, send)

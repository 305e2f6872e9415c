"""Paths as clients write them whose `base_url` lacks `/v1`.

The path is put right before anything looks at it (authentication, spans, routing), so a route has
the same key, limits and name under both. Only whole first segments of this list are touched:
nothing is decoded or normalised, and none of the operator's routes can be reached by another name.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

VERSION = "/v1"
WITHOUT = frozenset({"audio", "chat", "completions", "embeddings", "models", "responses"})
"""First segments of OpenAI's routes that are looked for below `/v1`."""


def versioned(path: str) -> str:
    """The path that a path is put right to."""
    return VERSION + path if path[1:].partition("/")[0] in WITHOUT else path


class Paths:
    """ASGI layer around everything that reads a path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"][1:].partition("/")[0] in WITHOUT:
            # In place: the layers outside read the route's pattern and the usage from this scope.
            scope["path"] = VERSION + scope["path"]
            if "raw_path" in scope:
                scope["raw_path"] = VERSION.encode() + scope["raw_path"]
        await self._app(scope, receive, send)

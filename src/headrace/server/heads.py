"""HEAD as in RFC 9110 (9.3.2): the status and headers of GET, without its body.

The GET runs as far as its headers; the body is not computed, so an endless stream ends at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Heads:
    """ASGI layer around the routes, inside authentication.

    `methods_of` returns the methods of a scope's path.
    """

    def __init__(self, app: ASGIApp, methods_of: Callable[[Scope], set[str]]) -> None:
        self._app = app
        self._methods_of = methods_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        # The HTTP server knows from its own scope that no body is to be sent.
        inner = {**scope, "method": "GET"} if "GET" in self._methods_of(scope) else scope
        over = asyncio.Event()

        async def heard() -> Message:
            if over.is_set():
                return {"type": "http.disconnect"}
            waiting = {asyncio.ensure_future(receive()), asyncio.ensure_future(over.wait())}
            try:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in waiting:
                    task.cancel()
            found = next((task.result() for task in done if task.result() is not True), None)
            return found or {"type": "http.disconnect"}  # type: ignore[return-value]

        async def send_head(message: Message) -> None:
            if over.is_set():
                return
            if message["type"] == "http.response.start":
                await send(message)
            elif message["type"] == "http.response.body":
                over.set()
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await self._app(inner, heard, send_head)
        except ClientDisconnect:
            if not over.is_set():
                raise
        finally:
            for name in inner.keys() - scope.keys():  # `Border` reads them later.
                scope[name] = inner[name]

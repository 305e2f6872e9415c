"""Handshake of a live session."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...base.errors import InvalidRequest
from ...engine.hearing.engine import HearingEngine
from ...engine.preload import give_back
from ..caller import CALLER
from ..socket import SOCKET_KEY, Socket
from .live import LiveSession

if TYPE_CHECKING:
    from ..accounts import Account
    from ..service import Service

CLEAR_SECONDS = 5.0
"""Seconds between two garbage collections after sessions end: they leave megabytes in reference
cycles."""


class Live(Response):
    """Response to a handshake: it lasts for the whole session."""

    cleared = 0.0

    def __init__(self, service: Service, engine: HearingEngine, request: Request) -> None:
        """Check that the session may open; raise the reason if not."""
        super().__init__(status_code=101)
        del self.headers["content-length"]
        service.check_model(request.query_params.get("model"))
        intent = request.query_params.get("intent", "transcription")
        if intent != "transcription":
            raise InvalidRequest(
                f"the intent must be transcription, not {intent[:100]!r}", param="intent"
            )
        engine.check_open()
        service.enter(request.scope)
        self._service, self._engine, self._places = service, engine, service.bodies.sessions
        self._beta = "realtime" in request.headers.get("openai-beta", "")
        self._account: Account | None = request.scope.get("headrace.account")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = CALLER.get().owner
        self._places.take(owner, 1)
        try:
            await self._served(scope, receive, send)
        finally:
            self._places.give(owner, 1)

    async def _served(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket: Socket = scope["headrace.socket"]
        offered = [each for each in socket.subprotocols if not each.startswith(SOCKET_KEY)]
        socket.subprotocol = "realtime" if "realtime" in offered else next(iter(offered), None)
        await send({"type": "http.response.start", "status": 101, "headers": self.raw_headers})
        session = LiveSession(
            self._service, self._engine, self._account, send, scope, beta=self._beta
        )
        self._engine.metrics.sessions.inc()
        self._engine.sessions += 1
        try:
            await session.run(receive, socket)
        finally:
            self._engine.metrics.sessions.dec()
            self._engine.sessions -= 1
            if time.monotonic() > Live.cleared + CLEAR_SECONDS:
                Live.cleared = time.monotonic()
                gc.collect()
                give_back()
            if not socket.lost:
                await send({"type": "http.response.body", "body": b"", "more_body": False})

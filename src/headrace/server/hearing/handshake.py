"""Handshake of a live session."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ...base.errors import InvalidRequest
from ...engine.hearing.engine import HearingEngine
from ...engine.preload import give_back
from ..session import SessionReply
from ..socket import Socket
from .live import LiveSession

if TYPE_CHECKING:
    from ..service import Service

CLEAR_SECONDS = 5.0
"""Seconds between two garbage collections after sessions end: they leave megabytes in reference
cycles."""


class Live(SessionReply):
    """Response to a handshake: it lasts for the whole session."""

    cleared = 0.0
    protocol = "realtime"

    def __init__(self, service: Service, engine: HearingEngine, request: Request) -> None:
        """Check that the session may open; raise the reason if not."""
        service.check_model(request.query_params.get("model"))
        intent = request.query_params.get("intent", "transcription")
        if intent != "transcription":
            raise InvalidRequest(
                f"the intent must be transcription, not {intent[:100]!r}", param="intent"
            )
        engine.check_open()
        super().__init__(service, request)
        self._engine = engine
        self._beta = "realtime" in request.headers.get("openai-beta", "")

    async def serve(self, scope: Scope, receive: Receive, send: Send, socket: Socket) -> bool:
        session = LiveSession(
            self._service, self._engine, self._account, send, scope, beta=self._beta
        )
        self._engine.metrics.sessions.inc()
        self._engine.sessions += 1
        try:
            return await session.run(receive, socket)
        finally:
            self._engine.metrics.sessions.dec()
            self._engine.sessions -= 1
            if time.monotonic() > Live.cleared + CLEAR_SECONDS:
                Live.cleared = time.monotonic()
                gc.collect()
                give_back()

"""A websocket's connection: uvicorn's, with a bound on how long a client may not read."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from .protocol import STALL_SECONDS

if TYPE_CHECKING:
    from .meter import HttpMeter

log = logging.getLogger("headrace.server")


class BoundedSocket(WebSocketsSansIOProtocol):
    """The bound is an attribute of the class, so that tests can lower it."""

    stall_seconds = STALL_SECONDS
    meter: HttpMeter | None = None
    """Counts what ends here."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._stall: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unstall()
        self._stall = self.loop.call_later(self.stall_seconds, self._stalled)

    def resume_writing(self) -> None:
        self._unstall()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unstall()
        super().connection_lost(exc)

    def _unstall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self) -> None:
        log.info("a client that reads nothing was left")
        if self.meter is not None:
            self.meter.failed("reader_stalled")
        self.transport.abort()

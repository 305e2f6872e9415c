"""A websocket's connection: uvicorn's, with limits on held data and on the time that a client does
not read."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ..base.errors import InvalidRequest
from .protocol import STALL_SECONDS

if TYPE_CHECKING:
    from websockets.frames import Frame

    from .meter import HttpMeter

log = logging.getLogger("headrace.server")
PIECE = 4096
"""Bytes that are read at once; hundreds of the smallest messages."""
INVALID_DATA = 1007
"""Close code of RFC 6455 (7.4.1)."""


class BoundedSocket(WebSocketsSansIOProtocol):
    """Bounded websocket connection. The limit is a class attribute, so that tests can lower it."""

    stall_seconds = STALL_SECONDS
    meter: HttpMeter | None = None
    """Counter of the connections that end at a limit."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._stall: asyncio.TimerHandle | None = None
        self._unread = bytearray()
        self.frames: list[Any] = []

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

    def data_received(self, data: bytes) -> None:
        """Read no further than one message that the session has not taken yet: one piece of data
        may hold tens of thousands of messages."""
        self._unread += data
        self._read()

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        self._read()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        self._read()

    def _read(self) -> None:
        while self._unread and not self.read_paused and not self.transport.is_closing():
            piece = bytes(self._unread[:PIECE])
            del self._unread[:PIECE]
            super().data_received(piece)

    def handle_cont(self, event: Frame) -> None:
        """Join the frames of a message as they come: as a list they take more memory than their
        content."""
        (whole,) = self.frames
        self.frames = [whole if isinstance(whole, bytearray) else bytearray(whole)]
        self.frames[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        """Close on a text that is not UTF-8, and count it: uvicorn would log a traceback for
        each."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:
                if self.meter is not None:
                    self.meter.refused(InvalidRequest("no UTF-8", code="invalid_utf8"))
                self.frames = []
                self.conn.send_close(INVALID_DATA)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def _unstall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self) -> None:
        log.info("a client that reads nothing was left")
        if self.meter is not None:
            self.meter.failed("reader_stalled")
        self.transport.abort()

"""Admission of websocket sessions, and the reading of their messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ..base.errors import HeadraceError, InvalidRequest, Overloaded
from ..base.extras import install
from .caller import CALLER
from .socket import GOING_AWAY, SOCKET_KEY, Socket

if TYPE_CHECKING:
    from .accounts import Account
    from .service import Service

IDLE_SECONDS = 300.0
"""Seconds without a message of the client after which a session ends."""
LOOK_SECONDS = 1.0


class UpgradeNeeded(InvalidRequest):
    status = 426
    code = "upgrade_required"


def check_socket(request: Request) -> None:
    """Raise `UpgradeNeeded` unless the request is a websocket's handshake."""
    if "headrace.socket" not in request.scope:
        raise UpgradeNeeded(
            "a session needs a websocket; where the client asked for one, the server lacks the "
            f"package websockets ({install('audio')})"
        )


class SessionReply(Response):
    """Response to a handshake; lasts for the whole session, which counts toward the limit."""

    protocol = ""
    """Subprotocol to accept if the client offers it; otherwise its first offer is accepted."""

    def __init__(self, service: Service, request: Request) -> None:
        """Admit the session. Raises as `Service.enter`."""
        super().__init__(status_code=101)
        del self.headers["content-length"]
        service.enter(request.scope)
        self._service, self._places = service, service.bodies.sessions
        self._account: Account | None = request.scope.get("headrace.account")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = CALLER.get().owner
        self._places.take(owner, 1)
        socket: Socket = scope["headrace.socket"]
        try:
            offered = [each for each in socket.subprotocols if not each.startswith(SOCKET_KEY)]
            first = next(iter(offered), None)
            socket.subprotocol = self.protocol if self.protocol in offered else first
            await send({"type": "http.response.start", "status": 101, "headers": self.raw_headers})
            there = True
            try:
                there = await self.serve(scope, receive, send, socket)
            finally:
                if there and not socket.lost:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._places.give(owner, 1)

    async def serve(self, scope: Scope, receive: Receive, send: Send, socket: Socket) -> bool:
        """Serve the session; return whether its client may still be there."""
        raise NotImplementedError


async def read_messages(
    receive: Receive,
    socket: Socket,
    service: Service,
    take: Callable[[Message], Awaitable[None]],
    tell: Callable[[HeadraceError], Awaitable[None]],
    most: float | None = None,
) -> bool:
    """Process a client's messages until it leaves (return False), or the session must end (report
    the reason, return True). `most`: maximum seconds of the session."""
    begun = heard = time.monotonic()
    coming: asyncio.Future[Message] = asyncio.ensure_future(receive())
    try:
        while True:
            await asyncio.wait({coming}, timeout=LOOK_SECONDS)
            now, why = time.monotonic(), ""
            if service.draining:
                why = "the server is shutting down"
            elif most is not None and now - begun > most:
                why = f"a session lasts {most:.0f} seconds at most"
            elif now - heard > IDLE_SECONDS:
                why = f"nothing came for {IDLE_SECONDS:.0f} seconds"
            if why:
                await tell(Overloaded(why, code="session_ended"))
                socket.code, socket.reason = GOING_AWAY, why
                return True
            if not coming.done():
                continue
            message = coming.result()
            if message["type"] == "http.disconnect":
                return False
            heard = now
            await take(message)
            if socket.lost:
                return False  # Messages sent before it left are dropped.
            coming = asyncio.ensure_future(receive())
    finally:
        coming.cancel()

"""A websocket as one more exchange: what guards HTTP guards it.

The handshake of a websocket is a GET. This layer, outermost, shows it to the others as just that,
so ids, logs, metrics, names, origins, keys, quotas and spans need not know of sockets: none can be
forgotten. What the route answers with is what changes: status 101 accepts the socket, the parts of
its body are text messages, and its end closes it. Any other answer refuses the handshake.

The route finds `headrace.socket` in its scope; messages of the client come out of `receive` as
`websocket.receive`, and its end as `http.disconnect`.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..base.errors import HeadraceError

SOCKET_KEY = "openai-insecure-api-key."
"""OpenAI's prefix of a subprotocol that carries the key."""
GOING_AWAY, POLICY = 1001, 1008
"""Codes of RFC 6455 (7.4.1) that are sent here, beside 1000."""


@dataclass(slots=True)
class Socket:
    """What a route says of a socket beside its messages."""

    subprotocols: list[str]
    """What the client offers."""
    subprotocol: str | None = None
    """What the route takes of it."""
    code: int = 1000
    """Why it is closed."""
    reason: str = ""
    lost: bool = False
    """Has the client gone?"""

    def refuse(self, error: HeadraceError) -> None:
        """It is to be closed because of this."""
        self.code, self.reason = POLICY, error.message[:100]


class Sockets:
    """ASGI layer around all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        socket = Socket(list(scope.get("subprotocols", ())))
        shown = {
            **scope,
            "type": "http",
            "method": "GET",
            "scheme": scope.get("scheme", "ws").replace("ws", "http", 1),
            "headrace.socket": socket,
        }
        accepted = False

        async def received() -> Message:
            message = await receive()
            while message["type"] == "websocket.connect":
                message = await receive()
            if message["type"] == "websocket.disconnect":
                socket.lost = True
                return {"type": "http.disconnect"}
            return message

        async def sent(message: Message) -> None:
            nonlocal accepted
            if message["type"] == "http.response.start" and message["status"] == 101:
                accepted = True
                await send(
                    {
                        "type": "websocket.accept",
                        "subprotocol": socket.subprotocol,
                        "headers": message["headers"],
                    }
                )
            elif not accepted:
                await send({**message, "type": "websocket." + message["type"]})
            else:
                await self._part(message, socket, send)

        await self._app(shown, received, sent)

    async def _part(self, message: Message, socket: Socket, send: Send) -> None:
        if socket.lost:
            return
        try:
            if message["body"]:
                await send({"type": "websocket.send", "text": message["body"].decode()})
            if not message.get("more_body", False):
                code, reason = socket.code, socket.reason
                await send({"type": "websocket.close", "code": code, "reason": reason})
        except OSError:  # uvicorn's ClientDisconnected
            socket.lost = True

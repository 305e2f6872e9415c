"""Websockets shown to the other layers as an ordinary HTTP exchange.

The handshake of a websocket is a GET. This outermost layer presents it as one to the others. So
ids, logs, metrics, names, origins, keys, quotas and spans need not know of sockets, and none can be
forgotten. The route's response has a different meaning: status 101 accepts the socket, the parts of
its body are text messages, and its end closes it. Any other response refuses the handshake.

The route finds `headrace.socket` in its scope. Messages of the client come out of `receive` as
`websocket.receive`, and its end as `http.disconnect`.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..base.errors import HeadraceError

SOCKET_KEY = "openai-insecure-api-key."
"""OpenAI's prefix of a subprotocol that carries the key."""
GOING_AWAY, POLICY = 1001, 1008
"""Close codes of RFC 6455 (7.4.1) that are sent in addition to 1000."""


@dataclass(slots=True)
class Socket:
    """A route's control of a socket, apart from its messages."""

    subprotocols: list[str]
    """Subprotocols that the client offers."""
    subprotocol: str | None = None
    """Subprotocol that the route accepts."""
    code: int = 1000
    """Close code."""
    reason: str = ""
    lost: bool = False
    """Whether the client has gone."""

    def refuse(self, error: HeadraceError) -> None:
        """Close the socket because of this error."""
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

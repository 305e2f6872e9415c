"""Serving of a chat request: its stream as JSON or events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from ...connection import EventStream, while_connected
from .answer import events, whole
from .request import begin
from .schema import ChatBody

if TYPE_CHECKING:
    from ...service import Service


async def serve(service: Service, request: Request, body: ChatBody) -> Response:
    name = request.scope["headrace.request_id"]
    chat, stream = await begin(service, body, name, whole=not body.stream)
    request.scope["headrace.usage"] = chat.usage
    if body.stream:
        return EventStream(events(chat, stream), keep_alive=service.keep_alive)
    return await while_connected(request.receive, whole(chat, stream))

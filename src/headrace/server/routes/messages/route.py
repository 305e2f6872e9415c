from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...entry import entered
from ...openapi import AnthropicError, replies, takes
from ...wire import json_response
from ..chat.request import Chat
from .convert import to_chat
from .schema import CountBody, CountReply, MessageReply, MessagesBody
from .serve import serve

router = APIRouter(tags=["Anthropic"])


@router.post("/v1/messages", responses=replies(MessageReply, stream=True, error=AnthropicError))
@takes(MessagesBody)
async def messages(request: Request) -> Response:
    """Generate the next message of a conversation, in Anthropic's format."""
    service, body = await entered(request, MessagesBody)
    return await serve(service, request, body)


@router.post("/v1/messages/count_tokens", responses=replies(CountReply, error=AnthropicError))
@takes(CountBody)
async def count_tokens(request: Request) -> Response:
    """Count a conversation's tokens without answering it."""
    service, body = await entered(request, CountBody)
    service.check_model(body.model)
    sees = service.pictures is not None
    chat = Chat(service, await service.hands.beside(lambda: to_chat(body, sees=sees)), "")
    await chat.tokenise(counts=True)
    return json_response({"input_tokens": len(chat.prompt)})

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...body import read_model
from ...openapi import replies, takes
from ...service import of
from .schema import ChatBody, ChatReply
from .serve import serve

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", responses=replies(ChatReply, stream=True))
@takes(ChatBody)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    service = of(request)
    service.enter(request.scope)
    body = await read_model(request, ChatBody, service.options.max_body)
    return await serve(service, request, body)

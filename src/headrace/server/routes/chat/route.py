from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...entry import entered
from ...openapi import replies, takes
from .schema import ChatBody, ChatReply
from .serve import serve

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", responses=replies(ChatReply, stream=True))
@takes(ChatBody)
async def chat_completions(request: Request) -> Response:
    """Generate the next message of a conversation."""
    service, body = await entered(request, ChatBody)
    return await serve(service, request, body)

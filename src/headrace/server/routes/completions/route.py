from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...entry import entered
from ...openapi import replies, takes
from .schema import CompletionBody, CompletionReply
from .serve import serve

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/completions", responses=replies(CompletionReply, stream=True))
@takes(CompletionBody)
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    service, body = await entered(request, CompletionBody)
    return await serve(service, request, body)

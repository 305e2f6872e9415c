from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...body import read_model
from ...openapi import replies, takes
from ...service import of
from .schema import CompletionBody, CompletionReply
from .serve import serve

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/completions", responses=replies(CompletionReply, stream=True))
@takes(CompletionBody)
async def completions(request: Request) -> Response:
    """Continue one or more prompts."""
    service = of(request)
    service.enter(request.scope)
    body = await read_model(request, CompletionBody, service.options.max_body)
    return await serve(service, request, body)

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...body import read_model
from ...openapi import replies, takes
from ...service import of
from .schema import EmbeddingBody, EmbeddingReply
from .serve import serve

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/embeddings", responses=replies(EmbeddingReply))
@takes(EmbeddingBody)
async def embeddings(request: Request) -> Response:
    """The vectors of one or more inputs."""
    service = of(request)
    service.enter(request.scope)
    body = await read_model(request, EmbeddingBody, service.options.max_body)
    return await serve(service, request, body)

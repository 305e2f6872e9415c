from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...entry import entered
from ...openapi import replies, takes
from .schema import EmbeddingBody, EmbeddingReply
from .serve import serve

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/embeddings", responses=replies(EmbeddingReply))
@takes(EmbeddingBody)
async def embeddings(request: Request) -> Response:
    """The vectors of one or more inputs."""
    service, body = await entered(request, EmbeddingBody)
    return await serve(service, request, body)

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...body import read_model
from ...openapi import replies, takes
from ...service import of
from .schema import ScoreBody, ScoreReply
from .serve import serve

router = APIRouter(tags=["rerank"])


@router.post("/v1/score", responses=replies(ScoreReply))
@router.post("/score", responses=replies(ScoreReply))
@takes(ScoreBody)
async def score(request: Request) -> Response:
    """How well pairs of texts fit."""
    service = of(request)
    service.enter(request.scope)
    body = await read_model(request, ScoreBody, service.options.max_body)
    return await serve(service, request, body)

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...entry import entered
from ...openapi import replies, takes
from .schema import ScoreBody, ScoreReply
from .serve import serve

router = APIRouter(tags=["rerank"])


@router.post("/v1/score", responses=replies(ScoreReply))
@router.post("/score", responses=replies(ScoreReply))
@takes(ScoreBody)
async def score(request: Request) -> Response:
    """How well pairs of texts fit."""
    service, body = await entered(request, ScoreBody)
    return await serve(service, request, body)

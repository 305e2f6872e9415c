from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...entry import entered
from ...openapi import replies, takes
from .schema import RerankBody, RerankReply
from .serve import serve

router = APIRouter(tags=["rerank"])


@router.post("/v2/rerank", responses=replies(RerankReply))
@router.post("/v1/rerank", responses=replies(RerankReply))
@router.post("/rerank", responses=replies(RerankReply))
@takes(RerankBody)
async def rerank(request: Request) -> Response:
    """Documents in the order in which they fit a query."""
    service, body = await entered(request, RerankBody)
    show = not request.url.path.startswith("/v2/")
    return await serve(service, request, body, show_documents=show)

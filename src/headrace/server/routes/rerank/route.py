from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...body import read_model
from ...openapi import replies, takes
from ...service import of
from .schema import RerankBody, RerankReply
from .serve import serve

router = APIRouter(tags=["rerank"])


@router.post("/v2/rerank", responses=replies(RerankReply))
@router.post("/v1/rerank", responses=replies(RerankReply))
@router.post("/rerank", responses=replies(RerankReply))
@takes(RerankBody)
async def rerank(request: Request) -> Response:
    """Documents in the order in which they fit a query."""
    service = of(request)
    service.enter(request.scope)
    body = await read_model(request, RerankBody, service.options.max_body)
    show = not request.url.path.startswith("/v2/")
    return await serve(service, request, body, show_documents=show)

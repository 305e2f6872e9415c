"""`/rerank`, `/v1/rerank`, `/v2/rerank`."""

from __future__ import annotations

from typing import NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ..entry import entered
from ..fields import Integer, Loose
from ..openapi import replies, takes
from ..wire import json_response
from .embeddings import VectorFields, VectorUsage
from .score import best_first, scored


class Document(Loose):
    text: str


class RerankBody(VectorFields):
    query: str = Field(min_length=1)
    documents: list[str | Document] = Field(min_length=1)
    top_n: Integer | None = Field(None, ge=0, description="The best so many; 0 or none: all.")
    return_documents: bool | None = Field(
        None, description="Put the texts into the answer (default true; /v2/rerank: false)."
    )
    max_tokens_per_doc: Integer | None = Field(
        None, ge=1, description="Cut each input, its query included, to so many tokens (Cohere)."
    )


class RerankDocument(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[RerankDocument]


class RerankReply(TypedDict):
    id: str
    model: str
    results: list[RerankResult]
    usage: VectorUsage


router = APIRouter(tags=["rerank"])


@router.post("/v2/rerank", responses=replies(RerankReply))
@router.post("/v1/rerank", responses=replies(RerankReply))
@router.post("/rerank", responses=replies(RerankReply))
@takes(RerankBody)
async def rerank(request: Request) -> Response:
    """Documents in the order in which they fit a query."""
    service, body = await entered(request, RerankBody)
    service.check_model(body.model)
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    pairs, most = [(body.query, text) for text in texts], body.max_tokens_per_doc
    name, scores, usage = await scored(service, request, body, pairs, "rerank", "documents", most)
    shown = body.return_documents
    if shown is None:
        shown = not request.url.path.startswith("/v2/")
    results: list[RerankResult] = []
    for place in best_first(scores)[: body.top_n or None]:
        results.append({"index": place, "relevance_score": scores[place]})
        if shown:
            results[-1]["document"] = {"text": texts[place]}
    return json_response({"id": name, "model": service.name, "results": results, "usage": usage})

"""Routes for pairs of texts: `/score`, `/v1/score`, and `/rerank`, `/v1/rerank`, `/v2/rerank`."""

from __future__ import annotations

import time
from typing import NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...engine.clients.pairs import cut_limit, pairs_of, score_inputs
from ..entry import entered
from ..fields import Integer, Loose, ReplyHead
from ..openapi import replies, takes
from ..service import Service
from ..vectors import check_vectors
from ..wire import json_response
from .embeddings import VectorFields, VectorUsage, computed


class ScoreBody(VectorFields):
    text_1: str | list[str] = Field(description="One text for all of text_2, or one for each.")
    text_2: str | list[str]


class ScoreData(TypedDict):
    index: int
    object: str
    score: float


class ScoreReply(ReplyHead):
    data: list[ScoreData]
    usage: VectorUsage


router = APIRouter(tags=["rerank"])


@router.post("/v1/score", responses=replies(ScoreReply))
@router.post("/score", responses=replies(ScoreReply))
@takes(ScoreBody)
async def score(request: Request) -> Response:
    """Score how well pairs of texts fit."""
    service, body = await entered(request, ScoreBody)
    service.check_model(body.model)
    pairs = pairs_of(body.text_1, body.text_2)
    name, scores, usage = await scored(service, request, body, pairs, "score", "text_2")
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
    head = {"id": name, "object": "list", "created": int(time.time()), "model": service.name}
    return json_response({**head, "data": data, "usage": usage})


async def scored(
    service: Service,
    request: Request,
    body: VectorFields,
    pairs: list[tuple[str, str]],
    kind: str,
    param: str,
    most: int | None = None,
) -> tuple[str, list[float], VectorUsage]:
    """Score the pairs; return (request id, which begins with its `kind`; scores; usage).

    `most` further limits the tokens of a pair.
    """
    cross = check_vectors(service, pairs=True)
    limit = cut_limit(body.cut, service.engine.max_context)
    if most is not None:
        limit = min(most, service.engine.max_context if limit is None else limit)
    # In a thread: a long list would delay the streams.
    inputs = await service.hands.run(
        score_inputs, service.engine.tokenizer, pairs, cross=cross, limit=limit
    )
    name, found, usage = await computed(
        service, request, body, inputs.inputs, inputs.task, kind, param
    )
    return name, [output.score for output in inputs.scores(found)], usage


def best_first(scores: list[float]) -> list[int]:
    """Return the positions by descending score; equal scores keep their order."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))


class Document(Loose):
    text: str


class RerankBody(VectorFields):
    query: str = Field(min_length=1)
    documents: list[str | Document] = Field(min_length=1)
    top_n: Integer | None = Field(None, ge=0, description="Number of best results; 0 or null: all.")
    return_documents: bool | None = Field(
        None, description="Include the texts in the answer (default true; /v2/rerank: false)."
    )
    max_tokens_per_doc: Integer | None = Field(
        None, ge=1, description="Maximum tokens of each input, including the query (Cohere)."
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


@router.post("/v2/rerank", responses=replies(RerankReply))
@router.post("/v1/rerank", responses=replies(RerankReply))
@router.post("/rerank", responses=replies(RerankReply))
@takes(RerankBody)
async def rerank(request: Request) -> Response:
    """Sort documents by how well they fit a query."""
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

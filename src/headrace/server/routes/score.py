"""`/score`, `/v1/score`."""

from __future__ import annotations

import time

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...engine.pairs import cut_limit, pairs_of, score_inputs
from ..entry import entered
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


class ScoreReply(TypedDict):
    id: str
    object: str
    created: int
    model: str
    data: list[ScoreData]
    usage: VectorUsage


router = APIRouter(tags=["rerank"])


@router.post("/v1/score", responses=replies(ScoreReply))
@router.post("/score", responses=replies(ScoreReply))
@takes(ScoreBody)
async def score(request: Request) -> Response:
    """How well pairs of texts fit."""
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
    """(id of the request, which begins with its `kind`, score of each pair, usage); `most` bounds
    the tokens of a pair further."""
    cross = check_vectors(service, pairs=True)
    limit = cut_limit(body.cut, service.engine.max_context)
    if most is not None:
        limit = min(most, service.engine.max_context if limit is None else limit)
    # In a thread: a long list would hold up the streams.
    inputs = await service.hands.run(
        score_inputs, service.engine.tokenizer, pairs, cross=cross, limit=limit
    )
    name, found, usage = await computed(
        service, request, body, inputs.inputs, inputs.task, kind, param
    )
    return name, [output.score for output in inputs.scores(found)], usage


def best_first(scores: list[float]) -> list[int]:
    """The places of the scores, of equal ones the first first."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))

"""`/v1/ranking`: NIM's rerank."""

from __future__ import annotations

import math
from typing import Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ..entry import entered
from ..fields import Body
from ..openapi import replies, takes
from ..vectors import check_vectors
from ..wire import json_response
from .embeddings import VectorFields, VectorUsage
from .score import best_first, scored

router = APIRouter(tags=["NIM"])


class Passage(Body):
    text: str


class RankingBody(VectorFields):
    query: Passage
    passages: list[Passage] = Field(min_length=1)
    truncate: Literal["NONE", "END"] | None = Field(
        None, description="END cuts a longer input at its end; none: it is an error."
    )


class Ranking(TypedDict):
    index: int
    logit: float


class RankingReply(TypedDict):
    rankings: list[Ranking]
    usage: VectorUsage


@router.post("/v1/ranking", responses=replies(RankingReply))
@takes(RankingBody)
async def ranking(request: Request) -> Response:
    """Passages in the order in which they fit a query, with their logits.

    Of a model that embeds, which has none, the cosine stands in their place.
    """
    service, body = await entered(request, RankingBody)
    service.check_model(body.model)
    logits = check_vectors(service, pairs=True)
    pairs = [(body.query.text, passage.text) for passage in body.passages]
    _, scores, usage = await scored(service, request, body, pairs, "ranking", "passages")
    values = [_logit(score) for score in scores] if logits else scores
    rankings = [{"index": place, "logit": values[place]} for place in best_first(values)]
    return json_response({"rankings": rankings, "usage": usage})


def _logit(share: float) -> float:
    """What a sigmoid made the share of."""
    bounded = min(max(share, 1e-12), 1 - 1e-12)
    return math.log(bounded / (1 - bounded))

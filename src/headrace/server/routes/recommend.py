"""Route `/v1/recommend`: scores of candidates, and their order."""

from __future__ import annotations

import math
import time
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.errors import EngineFault, InvalidRequest
from ...base.outputs import Scores
from ...base.ranking import Ranker
from ...base.sampling import SamplingParams
from ...engine.clients.candidates import Candidates, read_candidates
from ...engine.clients.pairs import sigmoid
from ..caller import engine_id
from ..connection import while_connected
from ..entry import entered
from ..fields import Body, Integer, ReplyHead
from ..generation import Usage, check_whole
from ..openapi import replies, takes
from ..service import Service
from ..wire import json_response
from .rerank import best_first


class RecommendBody(Body):
    model: str | None = Field(None, description="Served name; null: the served model.")
    context: dict[str, Any] = Field(
        default_factory=dict,
        description="Features of the request: numbers, ids, lists of ids, or ids with weights.",
    )
    candidates: dict[str, Any] = Field(
        description="Features of the candidates: of each a list with a value for each candidate."
    )
    top_k: Integer | None = Field(
        None, ge=1, description="Number of best candidates in `order`; null: all."
    )
    priority: Integer | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower runs first (policy priority)."
    )
    request_id: str | None = Field(None, max_length=128, pattern=r"^[\x21-\x7e]+$")


class RecommendUsage(TypedDict):
    candidates: int
    ids: int


class RecommendReply(ReplyHead):
    scores: list[float]
    order: list[int]
    usage: RecommendUsage


router = APIRouter(tags=["recommend"])


@router.post("/v1/recommend", responses=replies(RecommendReply))
@takes(RecommendBody)
async def recommend(request: Request) -> Response:
    """Score candidates for a request, and sort them. `scores` are from 0 to 1, in the order of the
    candidates; `order` has their indices, the best first."""
    service, body = await entered(request, RecommendBody)
    service.check_model(body.model)
    given = ranker_of(service), body.context, body.candidates, service.engine.max_context
    # In a thread: thousands of values would delay the streams.
    read = await service.hands.run(read_candidates, *given)
    # A number that all candidates share is repeated for each: a small body may become large.
    service.bodies.take(request.scope, read.ranking.size)
    name = f"recommend-{body.request_id or request.scope['headrace.request_id']}"
    request.scope["headrace.usage"] = usage = Usage(service.name)
    usage.known_prompt(0, read.total)
    work = _ranked(service, read, name, body.priority or 0)
    logits = await while_connected(request.receive, work)
    reply: RecommendReply = {
        "id": name,
        "object": "recommendation",
        "created": int(time.time()),
        "model": service.name,
        "scores": [sigmoid(one) for one in logits],
        "order": best_first(logits)[: body.top_k],
        "usage": {"candidates": read.total, "ids": read.ids},
    }
    return json_response(reply)


def ranker_of(service: Service) -> Ranker:
    """Return the shape of the served ranker. Raises `InvalidRequest` if it is not a ranker."""
    ranker = service.engine.files.arch.ranker
    if ranker is None:
        raise InvalidRequest(
            f"{service.name} ranks no candidates; /v1/recommend needs a ranker",
            param="model",
            code="unsupported_model",
        )
    return ranker


async def _ranked(service: Service, read: Candidates, name: str, priority: int) -> list[float]:
    """Return the logit of each candidate."""
    stream = service.engine.submit(
        [0] * read.total,
        SamplingParams(),
        request_id=engine_id(name),
        priority=priority,
        task="rank",
        given=read.ranking,
    )
    try:
        async for delta in stream:
            check_whole(delta)
            if isinstance(delta.output, Scores):
                if not all(map(math.isfinite, delta.output.values)):
                    raise InvalidRequest(
                        "the scores of these features are no numbers: some are too large",
                        param="candidates",
                    )
                return delta.output.values
    finally:
        stream.cancel()
    raise EngineFault("a ranking ended without scores")

"""Route `/v1/recommend`: scores and order of candidates, or items of a catalogue."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, NotRequired

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.errors import DeadlineMissed, EngineFault, InvalidRequest
from ...base.items import MOST_BEAMS
from ...base.outputs import Scores
from ...base.sampling import SamplingParams
from ...engine.clients.candidates import Candidates, read_candidates
from ...engine.clients.pairs import sigmoid
from ..caller import engine_id
from ..connection import while_connected
from ..entry import entered
from ..fields import Body, Integer, ReplyHead, TokenId
from ..generation import Usage, check_whole
from ..openapi import replies, takes
from ..retrieval import RetrievedItem, catalogue_of, history_ids, retrieved, wish_of
from ..service import Service
from ..wire import json_response
from .rerank import best_first


class RecommendBody(Body):
    model: str | None = Field(None, description="Served name; null: the served model.")
    context: dict[str, Any] = Field(
        default_factory=dict,
        description="Features of the request: numbers, ids, lists of ids, or ids with weights.",
    )
    candidates: dict[str, Any] | None = Field(
        None,
        description="Features of the candidates: of each a list with a value for each candidate.",
    )
    top_k: Integer | None = Field(
        None, ge=1, description="Number of best candidates in `order`; null: all."
    )
    prompt: str | list[TokenId] | None = Field(
        None, description="Retrieval: text or token ids, to which the history is added."
    )
    history: list[str] | None = Field(
        None, description="Retrieval: items of the catalogue, the latest last."
    )
    k: Integer | None = Field(
        None, ge=1, le=MOST_BEAMS, description="Retrieval: number of items; null: 10."
    )
    beams: Integer | None = Field(
        None, ge=1, le=MOST_BEAMS, description="Retrieval: paths kept; null: k, at least 64."
    )
    cache_salt: str | None = Field(
        None, max_length=256, description="Retrieval: prefixes are shared within one salt."
    )
    timeout: float | None = Field(
        None, gt=0, le=3600, description="Seconds to the deadline of the whole request."
    )
    priority: Integer | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower runs first (policy priority)."
    )
    request_id: str | None = Field(None, max_length=128, pattern=r"^[\x21-\x7e]+$")


class RecommendUsage(TypedDict, total=False):
    candidates: int
    ids: int
    prompt_tokens: int
    total_tokens: int


class RecommendReply(ReplyHead):
    scores: NotRequired[list[float]]
    order: NotRequired[list[int]]
    items: NotRequired[list[RetrievedItem]]
    usage: RecommendUsage


_RANKING = "context", "candidates", "top_k"
_RETRIEVAL = "prompt", "history", "k", "beams", "cache_salt"
"""Fields that one kind of model alone takes."""
router = APIRouter(tags=["recommend"])


@router.post("/v1/recommend", responses=replies(RecommendReply))
@takes(RecommendBody)
async def recommend(request: Request) -> Response:
    """Score candidates for a request, and sort them: `scores` are from 0 to 1, in the order of the
    candidates; `order` has their indices, the best first. Or retrieve `items` of a catalogue, the
    best first, with the log-probabilities of their semantic ids."""
    service, body = await entered(request, RecommendBody)
    service.check_model(body.model)
    ranks = service.engine.files.arch.ranker is not None
    if not ranks:
        catalogue_of(service)
    for name in _RETRIEVAL if ranks else _RANKING:
        if getattr(body, name):
            what = "a language model with a catalogue" if ranks else "a ranker"
            raise InvalidRequest(f"{name} is for {what}", param=name)
    work = _ranking(service, request, body) if ranks else _retrieval(service, request, body)
    try:
        async with asyncio.timeout(body.timeout):
            reply = await work
    except TimeoutError:
        raise DeadlineMissed(f"stopped at its deadline, after {body.timeout} s") from None
    return json_response(reply)


def _begun(service: Service, request: Request, body: RecommendBody) -> RecommendReply:
    """Begin the reply."""
    return {
        "id": f"recommend-{body.request_id or request.scope['headrace.request_id']}",
        "object": "recommendation",
        "created": int(time.time()),
        "model": service.name,
        "usage": {},
    }


async def _ranking(service: Service, request: Request, body: RecommendBody) -> RecommendReply:
    if body.candidates is None:
        raise InvalidRequest("candidates is required", param="candidates")
    ranker = service.engine.files.arch.ranker
    assert ranker is not None, "the model is no ranker"
    given = ranker, body.context, body.candidates, service.engine.max_context
    # In a thread: thousands of values would delay the streams.
    read = await service.hands.run(read_candidates, *given)
    # A number that all candidates share is repeated for each: a small body may become large.
    service.bodies.take(request.scope, read.ranking.size)
    reply = _begun(service, request, body)
    request.scope["headrace.usage"] = usage = Usage(service.name)
    usage.known_prompt(0, read.total)
    work = _ranked(service, read, reply["id"], body.priority or 0)
    logits = await while_connected(request.receive, work)
    reply["scores"] = [sigmoid(one) for one in logits]
    reply["order"] = best_first(logits)[: body.top_k]
    reply["usage"] = {"candidates": read.total, "ids": read.ids}
    return reply


async def _retrieval(service: Service, request: Request, body: RecommendBody) -> RecommendReply:
    catalogue, wish = catalogue_of(service), wish_of(body.k, body.beams)
    # In a thread: a long text would delay the streams.
    ids = await service.hands.run(history_ids, service, catalogue, body.prompt, body.history)
    reply = _begun(service, request, body)
    request.scope["headrace.usage"] = usage = Usage(service.name)
    usage.known_prompt(0, len(ids))
    work = retrieved(
        service,
        ids,
        wish,
        name=reply["id"],
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    found = await while_connected(request.receive, work)
    reply["items"] = [
        {"item": catalogue.names[item], "score": score, "ids": catalogue.path(item)}
        for item, score in zip(found.items, found.scores, strict=True)
    ]
    reply["usage"] = {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    return reply


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

"""Routes `/pooling` and `/classify`."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.errors import InvalidRequest
from ..entry import entered
from ..fields import ReplyHead
from ..openapi import refuses, replies, takes
from ..wire import json_response
from .embeddings import EmbeddingBody, VectorFields, VectorUsage, embedded


class PoolingBody(EmbeddingBody, neglects="pooling"):
    task: Literal["embed"] | None = Field(
        None, description="Only vectors of whole inputs; token vectors are not returned."
    )


class PoolingData(TypedDict):
    index: int
    object: Literal["pooling"]
    data: list[float] | str


class PoolingReply(ReplyHead):
    data: list[PoolingData]
    usage: VectorUsage


class ClassifyBody(VectorFields):
    input: str | list[str]


router = APIRouter(tags=["rerank"])


@router.post("/pooling", responses=replies(PoolingReply))
@takes(PoolingBody)
async def pooling(request: Request) -> Response:
    """Pool one or more inputs; return the vectors of `/v1/embeddings`."""
    service, body = await entered(request, PoolingBody)
    name, found, usage = await embedded(service, request, body, "pool")
    data = [{"index": index, "object": "pooling", "data": each} for index, each in enumerate(found)]
    head = {"id": name, "object": "list", "created": int(time.time()), "model": service.name}
    return json_response({**head, "data": data, "usage": usage})


@router.post("/classify", responses=replies(dict[str, Any]))
@takes(ClassifyBody)
@refuses("400: no model that is served has labels for single texts")
async def classify(request: Request) -> Response:
    """Refuse with the reason: no served model has labels for single texts."""
    service, body = await entered(request, ClassifyBody)
    service.check_model(body.model)
    raise InvalidRequest(
        "this model has no labels for single texts: models that are served here write text, "
        "make vectors (/v1/embeddings) or score pairs of texts (/score, /rerank)",
        param="model",
        code="unsupported_model",
    )

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import InvalidRequest
from ...entry import entered
from ...errors import coded
from ...openapi import replies, takes
from ...wire import json_response
from ..embeddings.serve import embedded
from .schema import ClassifyBody, PoolingBody, PoolingReply

router = APIRouter(tags=["rerank"])


@router.post("/pooling", responses=replies(PoolingReply))
@takes(PoolingBody)
async def pooling(request: Request) -> Response:
    """What the model pools of one or more inputs: the vectors of `/v1/embeddings`."""
    service, body = await entered(request, PoolingBody)
    name = f"pool-{body.request_id or request.scope['headrace.request_id']}"

    def shaped(found: list[Any], counted: dict[str, int]) -> Response:
        data = [
            {"index": index, "object": "pooling", "data": each} for index, each in enumerate(found)
        ]
        head = {"id": name, "object": "list", "created": int(time.time()), "model": service.name}
        return json_response({**head, "data": data, "usage": counted})

    return await embedded(service, request, body, name, shaped)


@router.post("/classify", responses=replies(dict[str, Any]))
@takes(ClassifyBody)
async def classify(request: Request) -> Response:
    """Always an error that says why: no model that can be served has labels for single texts."""
    service, body = await entered(request, ClassifyBody)
    service.check_model(body.model)
    raise coded(
        InvalidRequest(
            "this model has no labels for single texts: models that are served here write text, "
            "make vectors (/v1/embeddings) or score pairs of texts (/score, /rerank)",
            param="model",
        ),
        "unsupported_model",
    )

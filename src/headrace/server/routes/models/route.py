"""`/v1/models`: the one model that is served, with what a client may want to know of it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...openapi import replies
from ...service import Service, of
from ...wire import json_response

router = APIRouter(tags=["OpenAI"])


class ModelReply(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(TypedDict):
    object: str
    data: list[ModelReply]


def describe(service: Service, adapter: str | None = None) -> ModelReply:
    """The model, or one of its adapters."""
    return {
        "id": adapter or service.name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "headrace",
        "root": service.engine.files.name,
        "parent": service.name if adapter else None,
        "max_model_len": service.engine.max_context,
    }


@router.get("/v1/models", responses=replies(ModelList, body=False))
async def models(request: Request) -> Response:
    """The model and its adapters."""
    service = of(request)
    adapters = [adapter.name for adapter in getattr(service.engine, "adapters", ())]
    listed = [describe(service), *(describe(service, name) for name in sorted(adapters))]
    return json_response({"object": "list", "data": listed})


@router.get("/v1/models/{model:path}", responses=replies(ModelReply, body=False))
async def model(request: Request, model: str) -> Response:
    """One model."""
    service = of(request)
    service.check_model(model, adapters=True)
    return json_response(describe(service, service.adapter(model)))

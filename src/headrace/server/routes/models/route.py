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


def describe(service: Service) -> ModelReply:
    return {
        "id": service.name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "headrace",
        "root": service.engine.files.name,
        "parent": None,
        "max_model_len": service.engine.max_context,
    }


@router.get("/v1/models", responses=replies(ModelList, errors=False))
async def models(request: Request) -> Response:
    """The models that are served."""
    return json_response({"object": "list", "data": [describe(of(request))]})


@router.get("/v1/models/{model:path}", responses=replies(ModelReply))
async def model(request: Request, model: str) -> Response:
    """One model."""
    service = of(request)
    service.check_model(model)
    return json_response(describe(service))

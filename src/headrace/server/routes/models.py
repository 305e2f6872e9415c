"""Route `/v1/models`: the served model and its properties."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal, NotRequired

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ..openapi import replies
from ..service import Service, of, runs_programs, writes
from ..wire import json_response
from .messages.serve import error_reply

router = APIRouter(tags=["OpenAI"])


HEARD_TOKENS = 448
"""Decoder tokens of a transcription model: prompt and text of one window."""


class ModelReply(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    input_modalities: list[Literal["text", "audio", "image", "video"]]
    task: NotRequired[
        Literal["transcription", "embedding", "recommendation", "program", "speech", "drawing"]
    ]
    """Task of the model; absent: text generation."""
    licence: NotRequired[str]
    """Licence of the weights, if it is known."""
    voices: NotRequired[list[str]]
    """Names of the voices of a program that speaks."""
    languages: NotRequired[list[str]]
    """Codes of the languages that a transcription request may name."""


class ModelList(TypedDict):
    object: str
    data: list[ModelReply]


class AnthropicModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class AnthropicModels(TypedDict):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str
    last_id: str


_TASKS: dict[str, Literal["recommendation", "drawing"]] = {
    "rank": "recommendation",
    "picture": "drawing",
}
"""Tasks of models that make neither text nor vectors."""


def describe(service: Service, name: str) -> ModelReply:
    """Describe the model under one of its names, or one of its adapters."""
    if service.runs(name):
        return _describe_program(service, name)
    served = service.served
    assert not runs_programs(served)
    if not writes(served):
        return {
            "id": name,
            "object": "model",
            "created": int(service.started),
            "owned_by": "headrace",
            "root": served.model_name,
            "parent": None,
            "max_model_len": HEARD_TOKENS,
            "input_modalities": ["audio"],
            "task": "transcription",
            "languages": sorted(served.languages),
        }
    reply: ModelReply = {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "headrace",
        "root": served.files.name,
        "parent": None if name in service.names else service.name,
        "max_model_len": served.max_context,
        "input_modalities": service.modalities,
    }
    if served.files.arch.task != "tokens":
        reply["task"] = _TASKS.get(served.files.arch.task, "embedding")
    if served.files.licence:
        reply["licence"] = served.files.licence
    return reply


def _describe_program(service: Service, name: str) -> ModelReply:
    program = service.routes_of_programs.engine.programs.get(name)
    reply: ModelReply = {
        "id": name,
        "object": "model",
        "created": int(service.started),
        "owned_by": "headrace",
        "root": name,
        "parent": None,
        "max_model_len": 0,
        "input_modalities": [],
        "task": "program",
    }
    if program is not None and program.licence:
        reply["licence"] = program.licence
    if program is not None and program.voice is not None:
        reply |= {"task": "speech", "input_modalities": ["text"]}
        reply["voices"] = list(program.voice.names)
    return reply


def voices_beside(service: Service) -> list[str]:
    """Return the names of speech programs served in addition to a model."""
    if service.programs is None or service.programs.engine is service.served:
        return []
    programs = service.programs.engine.programs
    return [name for name, one in programs.items() if one.voice is not None]


def names_of(service: Service) -> list[str]:
    """Return the names of one model, then those of its adapters."""
    adapters = [adapter.name for adapter in getattr(service.served, "adapters", ())]
    return [*service.names, *sorted(adapters)]


def describe_to_anthropic(model: ModelReply) -> AnthropicModel:
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "max_input_tokens": model["max_model_len"],
        "max_tokens": model["max_model_len"],
    }


@router.get("/v1/models", responses=replies(ModelList | AnthropicModels, body=False))
async def models(request: Request) -> Response:
    """List the models and their adapters. With the header `anthropic-version`: in Anthropic's
    format."""
    service = of(request)
    foreign = "anthropic-version" in request.headers
    resting = [] if service.residents is None else service.residents.resting
    listed = [describe(one, name) for one in (*service.models, *resting) for name in names_of(one)]
    listed += [describe(service, name) for name in voices_beside(service)]
    if foreign:
        ids = [each["id"] for each in listed]
        data = [describe_to_anthropic(each) for each in listed]
        return json_response(
            {"data": data, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}
        )
    return json_response({"object": "list", "data": listed})


@router.get("/v1/models/{model:path}", responses=replies(ModelReply | AnthropicModel, body=False))
async def model(request: Request, model: str) -> Response:
    """Describe one model."""
    service = of(request)
    if "anthropic-version" in request.headers:
        request.scope["headrace.error_reply"] = error_reply
    if model not in voices_beside(service):
        service = service.choose(model, resting=True)
        service.check_model(model, adapters=True)
    described = describe(service, model or service.name)
    if "anthropic-version" in request.headers:
        return json_response(describe_to_anthropic(described))
    return json_response(described)

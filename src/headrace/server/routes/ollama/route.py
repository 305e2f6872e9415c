from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import InvalidRequest
from ...entry import entered
from ...openapi import replies, takes
from ...residents import kept_seconds
from ...service import Service, of
from ...wire import json_response
from . import about, serve
from .convert import plain_name
from .schema import (
    Asked,
    EmbedBody,
    EmbeddingsBody,
    EmbeddingsReply,
    EmbedReply,
    GenerateBody,
    GenerateReply,
    OllamaChatBody,
    OllamaChatReply,
    OllamaError,
    PsReply,
    ShowBody,
    ShowReply,
    TagsReply,
    VersionReply,
)

router = APIRouter(tags=["Ollama"])


def _answers(model: Any, *, lines: bool = False, body: bool = True) -> dict[int | str, Any]:
    found = replies(model, body=body, error=OllamaError)
    if lines:
        found[200]["content"] = {"application/x-ndjson": {}}
        found[200]["description"] = "The answer, or with stream (the default) its lines."
    return found


@router.get("/api/version", responses=_answers(VersionReply, body=False))
async def version(request: Request) -> Response:
    """Return the version of Ollama whose interface this is."""
    return json_response({"version": about.INTERFACE})


@router.get("/api/tags", responses=_answers(TagsReply, body=False))
async def tags(request: Request) -> Response:
    """List the models and their adapters, those at rest too."""
    service = of(request)
    resting = [] if service.residents is None else service.residents.resting
    served = [one for one in (*service.models, *resting) if one.writes]
    models = [about.listed(one, name) for one in served for name in about.names(one)]
    return json_response({"models": models})


@router.get("/api/ps", responses=_answers(PsReply, body=False))
async def ps(request: Request) -> Response:
    """List the loaded models."""
    served = [one for one in of(request).models if one.writes]
    models = [about.loaded(one, name) for one in served for name in about.names(one)]
    return json_response({"models": models})


@router.post("/api/show", responses=_answers(ShowReply))
@takes(ShowBody)
async def show(request: Request) -> Response:
    """Describe the model."""
    service, body = await entered(request, ShowBody, wakes=lambda body: False)
    name = body.model or body.name
    if not name:
        raise InvalidRequest("model is required", param="model")
    service.check_model(plain_name(name), adapters=True)
    return json_response(about.show(service))


def _wakes(body: OllamaChatBody | GenerateBody) -> bool:
    """Whether a request loads its model; one that only asks to let it rest at once does not."""
    if isinstance(body, OllamaChatBody):
        asks = bool(body.messages)
    else:
        asks = bool(body.prompt or body.context) or body.suffix is not None
    return asks or body.keep_alive is None or kept_seconds(body.keep_alive) > 0


def keep(service: Service, request: Request, body: Asked) -> None:
    """Apply `keep_alive` for permitted callers: all if there are no keys, else operators."""
    residents = service.residents
    if body.keep_alive is None:
        return
    seconds = kept_seconds(body.keep_alive)
    account = request.scope.get("headrace.account")
    if residents is not None and (account is None or account.key.role == "operator"):
        residents.keep(service, seconds)


@router.post("/api/chat", responses=_answers(OllamaChatReply, lines=True))
@takes(OllamaChatBody)
async def chat(request: Request) -> Response:
    """Generate the next message of a conversation."""
    service, body = await entered(request, OllamaChatBody, wakes=_wakes)
    keep(service, request, body)
    return await serve.chat(service, request, body)


@router.post("/api/generate", responses=_answers(GenerateReply, lines=True))
@takes(GenerateBody)
async def generate(request: Request) -> Response:
    """Answer a prompt, continue it (raw), or fill the gap before a suffix."""
    service, body = await entered(request, GenerateBody, wakes=_wakes)
    keep(service, request, body)
    return await serve.generate(service, request, body)


@router.post("/api/embed", responses=_answers(EmbedReply))
@takes(EmbedBody)
async def embed(request: Request) -> Response:
    """Return the embedding vectors of one or more texts."""
    service, body = await entered(request, EmbedBody)
    keep(service, request, body)
    texts = [body.input] if isinstance(body.input, str) else list(body.input or ())
    if not texts:
        service.check_model(plain_name(body.model))
        took = {"total_duration": 0, "load_duration": 0, "prompt_eval_count": 0}
        return json_response({"model": body.model, "embeddings": [], **took})
    found, took = await serve.embed(service, request, body, texts)
    kept = ("total_duration", "load_duration", "prompt_eval_count")
    times = {name: took[name] for name in kept}
    return json_response({"model": body.model, "embeddings": found, **times})


@router.post("/api/embeddings", responses=_answers(EmbeddingsReply))
@takes(EmbeddingsBody)
async def embeddings(request: Request) -> Response:
    """Return the embedding vector of one text (older than `/api/embed`)."""
    service, body = await entered(request, EmbeddingsBody)
    keep(service, request, body)
    if not body.prompt:
        service.check_model(plain_name(body.model))
        return json_response({"embedding": []})
    (found,), _ = await serve.embed(service, request, body, [body.prompt])
    return json_response({"embedding": found})

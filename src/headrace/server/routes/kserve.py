"""Health and metadata of the Open Inference Protocol; inference uses OpenAI's routes."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...base.version import VERSION
from ..openapi import health, replies
from ..service import of
from ..wire import json_response

router = APIRouter(tags=["KServe v2"])


@router.get("/v2")
async def server(request: Request) -> Response:
    """Return name and version of the server."""
    return json_response({"name": "headrace", "version": VERSION, "extensions": []})


@router.get("/v2/health/live", responses=health())
async def live(request: Request) -> Response:
    """Return 200 while the engine makes progress."""
    alive = of(request).health()[1]
    return json_response({"live": alive}, status=200 if alive else 503)


@router.get("/v2/health/ready", responses=health())
async def ready(request: Request) -> Response:
    """Return 200 if a request would be served."""
    is_ready, alive, _, _ = of(request).health()
    good = is_ready and alive
    return json_response({"ready": good}, status=200 if good else 503)


@router.get("/v2/models/{model}", responses=replies(dict[str, Any], body=False))
async def model(request: Request, model: str) -> Response:
    """Return metadata of a served model."""
    service = of(request)
    if service.loaded:
        service = service.choose(model)
    service.check_model(model)
    return json_response(
        {
            "name": service.name,
            "versions": [service.fingerprint],
            "platform": "headrace",
            "inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1]}],
            "outputs": [{"name": "text", "datatype": "BYTES", "shape": [1]}],
        }
    )


@router.get("/v2/models/{model}/ready", responses=health(404))
async def model_ready(request: Request, model: str) -> Response:
    """Return 200 if a request to this model would be served."""
    service = of(request)
    if service.loaded:
        service = service.choose(model)
        service.check_model(model)
    is_ready, alive, _, _ = service.health()
    good = is_ready and alive
    return json_response({"name": model, "ready": good}, status=200 if good else 503)

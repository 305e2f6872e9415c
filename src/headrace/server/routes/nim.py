"""What NIM's clients, charts and probes ask beside OpenAI's routes; all values are true ones."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...base.version import VERSION
from ..openapi import raw, replies
from ..service import Service, of
from ..wire import json_response
from .metrics import render

router = APIRouter(tags=["NIM"])


@router.get("/v1/version")
async def version(request: Request) -> Response:
    """Release and API version."""
    return json_response({"release": VERSION, "api": "1"})


@router.get("/v1/metadata", responses=replies(dict[str, Any], body=False))
async def metadata(request: Request) -> Response:
    """The model, its licence, and how it runs."""
    service = of(request)
    engine = service.engine
    served = service.served_profile
    return json_response(
        {
            "version": VERSION,
            "modelInfo": [{"shortName": service.name, "modelUrl": engine.files.name}],
            "assetInfo": [path.name for path in engine.files.weights],
            "licenseInfo": {"name": engine.files.licence or "unknown"},
            "selectedModelProfileId": served.digest if served else service.fingerprint,
            "profile": profile(service),
            "certified": served and served.document(),
        }
    )


@router.get("/v1/manifest", responses=replies(dict[str, Any], body=False))
async def manifest(request: Request) -> Response:
    """The files and the resolved profile that are served."""
    service = of(request)
    files = [
        {"name": path.name, "bytes": path.stat().st_size}
        for path in service.engine.files.weights
        if path.exists()
    ]
    return json_response(
        {"model": service.engine.files.name, "files": files, "profile": profile(service)}
    )


@router.get("/v1/license", responses=replies(dict[str, Any], body=False))
async def licence(request: Request) -> Response:
    """The licences of the model and of the server."""
    files = of(request).engine.files
    return json_response(
        {
            "name": files.licence or "unknown",
            "type": "model",
            "model": files.name,
            "server": {"name": "Apache-2.0", "type": "software"},
        }
    )


@router.get("/v1/metrics", responses=raw("text/plain"))
async def metrics(request: Request) -> Response:
    """The same as `/metrics`."""
    return render(request)


def profile(service: Service) -> dict[str, Any]:
    """How the model runs: every decision with its reason."""
    engine = service.engine
    return {
        "id": service.fingerprint,
        "format": engine.files.format,
        "family": engine.files.arch.family,
        "max_model_len": engine.max_context,
        "decisions": {
            decision.name: {"value": decision.value, "reason": decision.reason}
            for decision in engine.decisions
        },
    }

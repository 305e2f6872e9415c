"""Health routes: ready means that a request would be served, live that the step loop runs."""

from __future__ import annotations

import math

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..openapi import health as probe
from ..service import Service, of
from ..wire import json_response

router = APIRouter(tags=["health"])


def ready(service: Service) -> Response:
    is_ready, alive, reason, retry_after = service.health()
    if is_ready and alive:
        word = {"object": "health.response", "status": "ready", "message": "ready"}
        return json_response(word | {"role": service.role})
    return json_response(
        {"object": "health.response", "status": "not ready", "message": reason},
        status=503,
        headers={"retry-after": str(max(1, math.ceil(retry_after or 1.0)))},
    )


@router.get("/health", responses=probe())
async def health(request: Request) -> Response:
    """Return 200 if a request would be served, else 503 with the reason."""
    return ready(of(request))


@router.get("/v1/health/ready", responses=probe())
async def health_ready(request: Request) -> Response:
    """Return 200 if a request would be served, else 503 with the reason."""
    return ready(of(request))


@router.get("/v1/health/live", responses=probe())
async def health_live(request: Request) -> Response:
    """Return 200 while the engine makes progress (or starts); 503 asks for a restart."""
    _, alive, reason, _ = of(request).health()
    if alive:
        return json_response({"object": "health.response", "status": "live", "message": "live"})
    return json_response(
        {"object": "health.response", "status": "not live", "message": reason}, status=503
    )

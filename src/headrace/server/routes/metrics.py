"""Route `/metrics` in Prometheus' text format: the engine's metric families and the server's."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from ..meter import HttpMeter
from ..openapi import raw
from ..service import of

router = APIRouter(tags=["operation"])


def render(request: Request) -> Response:
    service = of(request)
    meter: HttpMeter = request.app.state.meter
    meter.in_work.set(service.in_work)
    meter.draining.set(service.draining)
    meter.longest_hold.set(service.loop.longest)
    parts = [generate_latest(service.served.registry)] if service.loaded else []
    if service.programs is not None and service.programs.engine is not service.served:
        parts.append(generate_latest(service.programs.engine.registry))
    parts.append(generate_latest(meter.registry))
    return Response(b"".join(parts), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.get("/metrics", responses=raw("text/plain"))
async def metrics(request: Request) -> Response:
    """Return all metrics."""
    return render(request)

"""Route `/metrics` in Prometheus' text format: the engine's metric families and the server's."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from ..meter import HttpMeter
from ..openapi import raw
from ..service import Service, of

router = APIRouter(tags=["operation"])


def render(request: Request) -> Response:
    service = of(request)
    meter: HttpMeter = request.app.state.meter
    meter.in_work.set(service.in_work)
    meter.draining.set(service.draining)
    meter.longest_hold.set(service.loop.longest)
    parts = [engine_metrics(service)] if service.loaded else []
    parts.append(generate_latest(meter.registry))
    return Response(b"".join(parts), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Together(CollectorRegistry):
    """The registries of several models as one: each family once, with the samples of all."""

    def __init__(self, registries: list[CollectorRegistry]) -> None:
        super().__init__()
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()


def engine_metrics(service: Service) -> bytes:
    """Return the metrics of all models and programs; the label `model_name` distinguishes them."""
    registries = [one.served.registry for one in service.models]
    if service.programs is not None and service.programs.engine is not service.served:
        registries.append(service.programs.engine.registry)
    return generate_latest(registries[0] if len(registries) == 1 else _Together(registries))


@router.get("/metrics", responses=raw("text/plain"))
async def metrics(request: Request) -> Response:
    """Return all metrics."""
    return render(request)

"""Operator's routes `/operate/models`: models that come and go while the server serves."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.errors import InvalidRequest
from ..body import read_model
from ..faces import Resting
from ..fields import Body
from ..openapi import replies, takes
from ..service import Service, of, writes
from ..wire import json_response

router = APIRouter(tags=["operator"])


class LoadModelBody(Body):
    model: str = Field(
        min_length=1,
        max_length=4096,
        description="NAME[:option=value,...], as headrace serve takes it.",
    )


class Resident(TypedDict):
    names: list[str]
    model: str
    loaded: bool
    weight_bytes: int
    kv_bytes: int
    expires_in: float | None
    """Seconds after which it rests if no request comes; null: it stays."""


class ResidentList(TypedDict):
    models: list[Resident]


def residents_of(service: Service) -> Resting:
    """Return the server's model loader. Raises `Overloaded` while the server starts."""
    _ = service.served
    if service.residents is None:
        raise InvalidRequest("this server serves the one model that it was started with")
    return service.residents


def _shown(residents: Resting, service: Service, *, loaded: bool) -> Resident:
    served = service.served
    memory = getattr(served, "memory", {}) if loaded else {}
    left = residents.expires_in(service) if loaded else float("inf")
    return {
        "names": service.names,
        "model": served.files.name if writes(served) else served.model_name,
        "loaded": loaded,
        "weight_bytes": int(memory.get("weight_bytes", 0)),
        "kv_bytes": int(memory.get("kv_bytes", 0)),
        "expires_in": None if left == float("inf") else left,
    }


@router.get("/operate/models", responses=replies(ResidentList, bad_query=True))
async def listed(request: Request) -> Response:
    """List the models, with the memory of those that are loaded."""
    service = of(request)
    residents = residents_of(service)
    models = [_shown(residents, one, loaded=True) for one in service.models]
    models += [_shown(residents, one, loaded=False) for one in residents.resting]
    return json_response({"models": models})


@router.post("/operate/models", responses=replies(Resident))
@takes(LoadModelBody)
async def load(request: Request) -> Response:
    """Load another model; answer when it serves."""
    service = of(request)
    residents = residents_of(service)
    body = await read_model(request, LoadModelBody, service.options.max_body)
    one = await asyncio.shield(service.tasks.errand("load model", residents.load(body.model)))
    return json_response(_shown(residents, one, loaded=True))


@router.delete("/operate/models/{name:path}", responses=replies(dict[str, str], bad_query=True))
async def unload(request: Request, name: str) -> Response:
    """Unload a model; its requests are finished first, and new ones refused."""
    service = of(request)
    residents = residents_of(service)
    await asyncio.shield(service.tasks.errand("unload model", residents.unload(name)))
    return json_response({"unloaded": name})

"""The Open Inference Protocol (KServe v2): health, metadata, and inference of foreign programs.

A language model has metadata here; its requests use OpenAI's routes.
"""

from __future__ import annotations

from typing import Any, NotRequired

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.version import VERSION
from ..entry import entered
from ..errors import inference_error
from ..openapi import health, replies, takes
from ..program_fields import StreamBody
from ..service import Service, of
from ..wire import json_response

router = APIRouter(tags=["KServe v2"])
EXTENSIONS = ["binary_tensor_data", "model_repository", "sequence", "timeout"]


class InferenceError(TypedDict):
    """Body of an error: the message, and fields for programs."""

    error: str
    type: str
    param: str | None
    code: str | None


class TensorBody(BaseModel):
    """A tensor of a request: `data`, or bytes after the JSON and `binary_data_size`."""

    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] = Field(default_factory=dict)


class InferBody(BaseModel):
    """Tensors by name. The parameter `timeout` is in microseconds."""

    id: str = ""
    inputs: list[TensorBody]
    outputs: list[dict[str, Any]] = Field(default_factory=list)
    parameters: dict[str, Any] = Field(default_factory=dict)


class StreamReply(TypedDict):
    id: str
    """Parameter `stream` of each of its requests."""
    model_name: str
    period: float
    deadline: float
    run_seconds: float
    """Longest measured run, plus a margin."""
    utilisation: float
    lane: int


class TestReply(TypedDict):
    model_name: str
    passed: bool | None
    """null: it cannot be tested now, or its outputs are not repeatable."""
    whole: bool
    mode: str
    """NORMAL, DEGRADED or SAFE."""
    reason: str


class RepositoryEntry(TypedDict):
    name: str
    version: str
    state: str
    reason: NotRequired[str]


def _service(request: Request) -> Service:
    request.scope["headrace.error_reply"] = inference_error
    return of(request)


@router.get("/v2")
async def server(request: Request) -> Response:
    """Return name and version of the server."""
    extensions = EXTENSIONS if of(request).programs is not None else []
    return json_response({"name": "headrace", "version": VERSION, "extensions": extensions})


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


@router.get(
    "/v2/models/{model}", responses=replies(dict[str, Any], body=False, error=InferenceError)
)
async def model(request: Request, model: str) -> Response:
    """Return metadata of a program, or of a served model."""
    return _described(_service(request), model, None)


@router.get(
    "/v2/models/{model}/versions/{version}",
    responses=replies(dict[str, Any], body=False, error=InferenceError),
)
async def model_version(request: Request, model: str, version: str) -> Response:
    """Return metadata of a program in this version."""
    return _described(_service(request), model, version)


def _described(service: Service, model: str, version: str | None) -> Response:
    if service.runs(model):
        routes = service.routes_of_programs
        return json_response(routes.described(routes.find(model, version)))
    if service.loaded:
        service = service.choose(model, resting=True)
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


@router.get("/v2/models/{model}/ready", responses=health(404, error=InferenceError))
async def model_ready(request: Request, model: str) -> Response:
    """Return 200 if a request to this model would be served."""
    return _ready(_service(request), model, None)


@router.get(
    "/v2/models/{model}/versions/{version}/ready", responses=health(404, error=InferenceError)
)
async def version_ready(request: Request, model: str, version: str) -> Response:
    """Return 200 if a request to this version would be served."""
    return _ready(_service(request), model, version)


def _ready(service: Service, model: str, version: str | None) -> Response:
    if service.loaded and not service.runs(model):
        one = service.choose(model, resting=True)
        one.check_model(model)
        if one in service.models:  # A request for a resting model loads it.
            service = one
    is_ready, alive, _, _ = service.health()
    good = is_ready and alive
    if service.runs(model):
        good = service.routes_of_programs.find(model, version).serves and good
    return json_response({"name": model, "ready": good}, status=200 if good else 503)


@router.post("/v2/repository/index", responses=replies(list[RepositoryEntry], body=False))
async def index(request: Request) -> Response:
    """List the models and programs."""
    service = _service(request)
    found: list[RepositoryEntry] = []
    if service.programs is not None:
        routes = service.routes_of_programs
        for program in routes.engine.programs.values():
            entry = RepositoryEntry(
                name=program.name,
                version=routes.version(program),
                state="READY" if program.serves else "UNAVAILABLE",
            )
            why = "it is in safe mode" if program.ready else "its process starts"
            found.append(entry if program.serves else {**entry, "reason": why})
    for one in (one for one in service.models if one.writes):
        state = "READY" if one.health()[0] else "UNAVAILABLE"
        found += [{"name": name, "version": one.fingerprint, "state": state} for name in one.names]
    return json_response(found)


@router.post("/v2/models/{model}/infer", responses=replies(dict[str, Any], error=InferenceError))
@takes(InferBody)
async def infer(request: Request, model: str) -> Response:
    """Run a program. With the header Inference-Header-Content-Length, tensors follow the JSON."""
    return await _service(request).routes_of_programs.infer(request, model, None)


@router.post(
    "/v2/models/{model}/versions/{version}/infer",
    responses=replies(dict[str, Any], error=InferenceError),
)
@takes(InferBody)
async def infer_version(request: Request, model: str, version: str) -> Response:
    """Run a program in this version."""
    return await _service(request).routes_of_programs.infer(request, model, version)


@router.post(
    "/v2/models/{model}/test", responses=replies(TestReply, body=False, error=InferenceError)
)
async def test(request: Request, model: str) -> Response:
    """Run a program's self-test, and compare its bytes with those that were read."""
    service = _service(request)
    program = service.routes_of_programs.find(model)
    service.enter(request.scope)
    result = await service.routes_of_programs.engine.test(program)
    return json_response({"model_name": model, **result})


@router.post("/v2/models/{model}/streams", responses=replies(StreamReply, error=InferenceError))
@takes(StreamBody)
async def open_stream(request: Request, model: str) -> Response:
    """Admit a periodic stream of runs if they and all others will meet their deadlines."""
    _service(request).routes_of_programs.find(model)
    service, body = await entered(request, StreamBody)
    opened = await service.routes_of_programs.open_stream(request, model, body)
    return json_response(opened)


@router.delete(
    "/v2/models/{model}/streams/{stream}",
    responses=replies(dict[str, bool], body=False, error=InferenceError),
)
async def close_stream(request: Request, model: str, stream: str) -> Response:
    """End a stream."""
    _service(request).routes_of_programs.close_stream(model, stream)
    return json_response({"closed": True})

"""Inference of foreign programs over HTTP (KServe v2); imported only if programs are served, since
it needs numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ..base.errors import InvalidRequest, NotFound
from ..base.weight import LIGHT, weigh
from ..engine.programs.engine import OpenStream, ProgramEngine, SequenceStep
from ..engine.programs.executor import ServedProgram
from ..programs.onnx import Port
from ..sched.deadlines import CLASSES
from .body import MOST, read_body
from .caller import CALLER, RECEIVE
from .cameras import CameraReply
from .connection import while_connected
from .errors import UnsupportedMediaType
from .generation import Usage
from .reading import OcrRoutes
from .service import Service
from .tensors import DATATYPES, LENGTH_HEADER, Inference, json_length, read_infer, write_outputs

if TYPE_CHECKING:
    from .program_fields import StreamBody

PLATFORM = "onnxruntime_onnx"
_DATATYPES = {numpy: name for name, numpy in DATATYPES.items()}
PARAMETERS = (
    "binary_data_output", "class", "seed", "sequence_end", "sequence_id", "sequence_start",
    "stream", "timeout",
)  # fmt: skip
"""Parameters of a request; `timeout` is in microseconds, as Triton has it."""
MOST_TIMEOUT = 10**12
MANY = 4096
"""Elements of JSON outputs from which a thread writes them."""


class ProgramRoutes:
    """Inference routes of one server's programs."""

    def __init__(self, service: Service, engine: ProgramEngine) -> None:
        self.service, self.engine = service, engine
        self.ocr = OcrRoutes(service, engine)
        self.read = self.ocr.read

    def find(self, name: str, version: str | None = None) -> ServedProgram:
        """Return a program. Raises `NotFound` for an unknown name or version."""
        program = self.engine.find(name)
        own = self.version(program)
        if version is not None and version != own:
            raise NotFound(f"{name} has no version {version!r:.80}; it has {own}", param="version")
        return program

    def version(self, program: ServedProgram) -> str:
        """Return a program's version: the beginning of its file's digest."""
        return program.confined.inspection.sha256[:12]

    def described(self, program: ServedProgram) -> dict[str, Any]:
        """Return the metadata of a program."""
        graph = program.confined.inspection.described.graph
        return {
            "name": program.name,
            "versions": [self.version(program)],
            "platform": PLATFORM,
            "inputs": [_port(one) for one in program.confined.inputs.values()],
            "outputs": [_port(one) for one in graph.outputs],
        }

    async def infer(self, request: Request, name: str, version: str | None) -> Response:
        """Run a program on the request's tensors."""
        service = self.service
        service.check_open(request.scope)
        program = self.find(name, version)
        inference = await self._read(request)
        unknown = sorted(inference.parameters.keys() - set(PARAMETERS))
        if unknown:
            allowed = f"allowed: {', '.join(PARAMETERS)}"
            wrong = f"the parameter {unknown[0]!r:.80} is not known; {allowed}"
            raise InvalidRequest(wrong, param="parameters", code="unknown_parameter")
        service.enter(request.scope)
        RECEIVE.set(request.receive)
        request.scope["headrace.usage"] = Usage(name)
        work = self.engine.run(
            program,
            inference.inputs,
            seed=_whole(inference, "seed", 2**63),
            urgency=_class(inference),
            timeout=_whole(inference, "timeout", MOST_TIMEOUT) / 1e6 or math.inf,
            stream=_text(inference, "stream"),
            step=_step(inference),
            owner=CALLER.get().owner,
        )
        outputs = await while_connected(request.receive, work)
        service.bodies.take(request.scope, sum(one.nbytes for one in outputs.values()))
        many = sum(one.size for one in outputs.values()) > MANY
        write = (inference, outputs, name, self.version(program))
        body, length = (
            await service.hands.run(write_outputs, *write) if many else write_outputs(*write)
        )
        if length is None:
            return Response(body, media_type="application/json")
        headers = {LENGTH_HEADER: str(length)}
        return Response(body, media_type="application/octet-stream", headers=headers)

    async def _read(self, request: Request) -> Inference:
        """Read a request, off the event loop if its JSON is long."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise UnsupportedMediaType(f"the content encoding {encoding!r:.40} is not read")
        hands, length = self.service.hands, request.headers.get(LENGTH_HEADER)
        body = await read_body(request, self.service.options.max_body)
        head = json_length(length, len(body))
        if head > LIGHT:
            (await hands.run(weigh, body[:head])).verify(MOST, "the body")
            return await hands.run(read_infer, memoryview(body), length)
        return read_infer(memoryview(body), length)

    async def open_stream(self, request: Request, name: str, body: StreamBody) -> dict[str, Any]:
        """Measure and admit a periodic stream."""
        program = self.find(name)
        work = self.engine.open_stream(
            program,
            {name: tuple(shape) for name, shape in body.shapes.items()},
            period=body.period,
            deadline=body.deadline or body.period,
            values=body.values,
            most=self.service.options.max_body,
            owner=CALLER.get().owner,
        )
        return _stream_reply(await while_connected(request.receive, work))

    def cameras(self, request: Request) -> Response:
        """Open a session of cameras."""
        return CameraReply(self.service, self.ocr, request)

    def close_stream(self, name: str, stream: str) -> None:
        self.engine.close_stream(stream, CALLER.get().owner, self.find(name))


def _stream_reply(opened: OpenStream) -> dict[str, Any]:
    stream = opened.admitted.stream
    return {
        "id": opened.id,
        "model_name": opened.program.name,
        "period": stream.period,
        "deadline": stream.due,
        "run_seconds": stream.seconds,
        "utilisation": stream.utilisation,
        "lane": opened.admitted.lane,
    }


def _port(port: Port) -> dict[str, Any]:
    shape = [dim if isinstance(dim, int) else -1 for dim in port.dims or ()]
    return {"name": port.name, "datatype": _DATATYPES[port.type or ""], "shape": shape}


def _wrong(name: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value!r:.40}; allowed: {allowed}", param="parameters")


def _whole(inference: Inference, name: str, most: int) -> int:
    found = inference.parameters.get(name, 0)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
        raise _wrong(name, found, f"integers from 0 to {most}")
    return found


def _text(inference: Inference, name: str) -> str | None:
    found = inference.parameters.get(name)
    if found is not None and not (isinstance(found, str) and len(found) <= 128):
        raise _wrong(name, found, "a text of at most 128 characters")
    return found


def _class(inference: Inference) -> int:
    found = inference.parameters.get("class", "interactive")
    if not isinstance(found, str) or found not in CLASSES:
        raise _wrong("class", found, ", ".join(CLASSES))
    return CLASSES[found]


def _step(inference: Inference) -> SequenceStep | None:
    """Return the position in a sequence, or None for an id of 0 or ""."""
    found = inference.parameters.get("sequence_id", 0)
    if isinstance(found, bool) or not isinstance(found, int | str) or len(str(found)) > 128:
        raise _wrong("sequence_id", found, "an integer, or a text of at most 128 characters")
    flags = []
    for name in ("sequence_start", "sequence_end"):
        flag = inference.parameters.get(name, False)
        if not isinstance(flag, bool):
            raise _wrong(name, flag, "true, false")
        flags.append(flag)
    if not found:
        if any(flags):
            raise _wrong("sequence_id", found, "an id other than 0, with sequence_start and _end")
        return None
    return SequenceStep(repr(found), *flags)

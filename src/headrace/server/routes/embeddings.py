"""Route `/v1/embeddings`."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.errors import InvalidRequest
from ...base.spec import Task
from ...engine.clients.pairs import Input, cut_limit
from ..connection import while_connected
from ..entry import entered
from ..fields import Body, Integer, TokenId
from ..generation import Usage
from ..openapi import replies, takes
from ..service import Service
from ..vectors import check_vectors, vectors
from ..wire import json_response


class VectorFields(Body, neglects="vectors"):
    """Fields common to the routes that return vectors."""

    model: str | None = Field(None, description="Served name; null: the served model.")
    truncate_prompt_tokens: Integer | None = Field(
        None,
        description="Maximum input tokens; a longer input is cut at its end (-1: to fit); null: "
        "a longer input is an error.",
    )
    priority: Integer | None = Field(
        None, ge=-(2**31), lt=2**31, description="Lower runs first (policy priority)."
    )
    request_id: str | None = Field(None, max_length=128, pattern=r"^[\x21-\x7e]+$")
    truncate: Literal["NONE", "END"] | None = Field(
        None, description="NIM's field: END cuts inputs that do not fit; NONE makes them errors."
    )

    @property
    def cut(self) -> int | None:
        """Value of `truncate_prompt_tokens`, or the equivalent of `truncate`."""
        if self.truncate == "END" and self.truncate_prompt_tokens is None:
            return -1
        return self.truncate_prompt_tokens


class EmbeddingBody(VectorFields):
    IDS: ClassVar = "input"
    input: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="Text, token ids, or a list of either. Ids are used unchanged."
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64: little-endian 32-bit floats."
    )
    dimensions: Integer | None = Field(
        None, description="Length of the vectors; shorter only if the model was trained for it."
    )


class EmbeddingData(TypedDict):
    object: str
    index: int
    embedding: list[float] | str


class VectorUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(TypedDict):
    object: str
    data: list[EmbeddingData]
    model: str
    usage: VectorUsage


router = APIRouter(tags=["OpenAI"])


Encoded = list[float] | str


@router.post("/v1/embeddings", responses=replies(EmbeddingReply))
@takes(EmbeddingBody)
async def embeddings(request: Request) -> Response:
    """Return the embedding vectors of one or more inputs."""
    service, body = await entered(request, EmbeddingBody)
    _, found, usage = await embedded(service, request, body, "embd")
    data = [
        {"object": "embedding", "index": index, "embedding": each}
        for index, each in enumerate(found)
    ]
    return json_response({"object": "list", "data": data, "model": service.name, "usage": usage})


async def embedded(
    service: Service, request: Request, body: EmbeddingBody, kind: str
) -> tuple[str, list[Encoded], VectorUsage]:
    """Compute embeddings; return (request id, which begins with its `kind`; vectors; usage)."""
    service.check_model(body.model)
    check_vectors(service, pairs=False)
    size = dimensions_of(service, body.dimensions)
    limit = cut_limit(body.cut, service.engine.max_context)
    # In a thread: a long list would delay the streams.
    inputs = await service.hands.run(_inputs, service, body, limit)
    name, found, usage = await computed(service, request, body, inputs, "vector", kind, "input")
    return name, [_encoded(shortened(each, size), body.encoding_format) for each in found], usage


async def computed(
    service: Service,
    request: Request,
    body: VectorFields,
    inputs: Sequence[Input],
    task: Task,
    kind: str,
    param: str,
) -> tuple[str, list[list[float]], VectorUsage]:
    """Compute `task` for each input while the client stays; return (request id, results, usage)."""
    name = f"{kind}-{body.request_id or request.scope['headrace.request_id']}"
    request.scope["headrace.usage"] = usage = Usage(service.name)
    priority = body.priority or 0
    work = vectors(
        service, inputs, task, request_id=name, priority=priority, usage=usage, param=param
    )
    found = await while_connected(request.receive, work)
    return name, found, {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}


def dimensions_of(service: Service, wish: int | None) -> int | None:
    """Return the requested length of the vectors, checked, or None for full length.

    Raises `InvalidRequest`.
    """
    files = service.engine.files
    hidden = files.arch.hidden
    if wish is None or wish == hidden:
        return None
    if not files.pooling.shortens:
        raise InvalidRequest(
            f"dimensions must be {hidden}: this model was not made for shorter vectors",
            param="dimensions",
        )
    if not 1 <= wish <= hidden:
        raise InvalidRequest(
            f"dimensions must be from 1 to {hidden}, not {wish}", param="dimensions"
        )
    return wish


def _inputs(service: Service, body: EmbeddingBody, limit: int | None) -> list[Input]:
    given: Any = body.input
    one = isinstance(given, str) or (given and isinstance(given[0], int))
    return [
        (_ids(service, item, limit, "input" if one else f"input.{place}"), 0)
        for place, item in enumerate([given] if one else given)
    ]


def _ids(service: Service, item: str | list[int], limit: int | None, where: str) -> list[int]:
    if isinstance(item, str):
        if not item:
            raise InvalidRequest("an input is empty", param=where)
        ids: list[int] = service.engine.tokenizer.encode_with_specials(item, limit=limit)
        return ids
    service.check_ids(item, where)
    return list(item[:limit])


def shortened(vector: list[float], size: int | None) -> list[float]:
    """Return the first `size` values, normalised to length one."""
    if size is None:
        return vector
    cut = vector[:size]
    norm = math.sqrt(sum(value * value for value in cut)) or 1.0
    return [value / norm for value in cut]


def _encoded(vector: list[float], form: str | None) -> Encoded:
    if form != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

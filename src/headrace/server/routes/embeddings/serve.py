"""An embeddings request: inputs → ids → vectors → one JSON."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import InvalidRequest
from ....engine.pairs import Input, cut_limit
from ...connection import while_connected
from ...generation import Usage
from ...prompts import check_ids
from ...vectors import check_vectors, vectors
from ...wire import json_response
from .schema import EmbeddingBody

if TYPE_CHECKING:
    from ...service import Service

Encoded = list[float] | str


async def serve(service: Service, request: Request, body: EmbeddingBody) -> Response:
    name = f"embd-{body.request_id or request.scope['headrace.request_id']}"

    def shaped(found: list[Encoded], counted: dict[str, int]) -> Response:
        data = [
            {"object": "embedding", "index": index, "embedding": each}
            for index, each in enumerate(found)
        ]
        return json_response(
            {"object": "list", "data": data, "model": service.name, "usage": counted}
        )

    return await embedded(service, request, body, name, shaped)


async def embedded(
    service: Service,
    request: Request,
    body: EmbeddingBody,
    name: str,
    shaped: Callable[[list[Encoded], dict[str, int]], Response],
) -> Response:
    """The answer that `shaped` makes of the vectors and the usage; `name`: the request's id."""
    service.check_model(body.model)
    check_vectors(service, pairs=False)
    size = dimensions_of(service, body.dimensions)
    limit = cut_limit(body.cut, service.engine.max_context)
    # In a thread: a long list would hold up the streams.
    inputs = await service.hands.run(_inputs, service, body, limit)
    usage = Usage()
    request.scope["headrace.usage"] = usage

    async def whole() -> Response:
        found = await vectors(
            service,
            inputs,
            "vector",
            request_id=name,
            priority=body.priority or 0,
            usage=usage,
            param="input",
        )
        encoded = [_encoded(shortened(vector, size), body.encoding_format) for vector in found]
        return shaped(encoded, {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt})

    return await while_connected(request.receive, whole())


def dimensions_of(service: Service, wish: int | None) -> int | None:
    """The wished length of the vectors, checked; None: full length. Raises `InvalidRequest`."""
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
    check_ids(service, item, where)
    return list(item[:limit])


def shortened(vector: list[float], size: int | None) -> list[float]:
    """The first `size` of it, at length one again."""
    if size is None:
        return vector
    cut = vector[:size]
    norm = math.sqrt(sum(value * value for value in cut)) or 1.0
    return [value / norm for value in cut]


def _encoded(vector: list[float], form: str | None) -> Encoded:
    if form != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

"""Pairs of texts → scores; `/rerank` goes through here too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from ....engine.pairs import cut_limit, pairs_of, score_inputs
from ...connection import while_connected
from ...generation import Usage
from ...vectors import check_vectors, vectors
from ...wire import json_response
from ..embeddings.schema import VectorFields
from .schema import ScoreBody

if TYPE_CHECKING:
    from ...service import Service


async def scores_of(
    service: Service,
    body: VectorFields,
    pairs: list[tuple[str, str]],
    *,
    request_id: str,
    usage: Usage,
    param: str,
    most: int | None = None,
) -> list[float]:
    """The score of each pair; `most` bounds the tokens of one further."""
    cross = check_vectors(service, pairs=True)
    limit = cut_limit(body.cut, service.engine.max_context)
    if most is not None:
        limit = min(most, service.engine.max_context if limit is None else limit)
    # In a thread: a long list would hold up the streams.
    inputs = await service.hands.run(
        score_inputs, service.engine.tokenizer, pairs, cross=cross, limit=limit
    )
    found = await vectors(
        service,
        inputs.inputs,
        inputs.task,
        request_id=request_id,
        priority=body.priority or 0,
        usage=usage,
        param=param,
    )
    return [output.score for output in inputs.scores(found)]


async def serve(service: Service, request: Request, body: ScoreBody) -> Response:
    service.check_model(body.model)
    request_id = f"score-{body.request_id or request.scope['headrace.request_id']}"
    pairs = pairs_of(body.text_1, body.text_2)
    usage = Usage()
    request.scope["headrace.usage"] = usage

    async def whole() -> Response:
        scores = await scores_of(
            service, body, pairs, request_id=request_id, usage=usage, param="text_2"
        )
        return json_response(
            {
                "id": request_id,
                "object": "list",
                "created": int(time.time()),
                "model": service.name,
                "data": [
                    {"index": index, "object": "score", "score": score}
                    for index, score in enumerate(scores)
                ],
                "usage": {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt},
            }
        )

    return await while_connected(request.receive, whole())

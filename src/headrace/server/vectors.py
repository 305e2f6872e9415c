"""Computation of vectors for many inputs: embeddings, rerank and score."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base.errors import ContextOverflow, EngineFault, InvalidRequest
from ..base.outputs import Scores, Vector
from ..base.sampling import SamplingParams
from .caller import engine_id
from .generation import Usage, check_whole

if TYPE_CHECKING:
    from ..base.spec import Task
    from ..engine.clients.face import ServingEngine
    from ..engine.clients.pairs import Input
    from .service import Service

MAX_INPUTS = 2048
"""Maximum inputs of one request."""
IN_WORK = 128
"""Inputs of one request in the engine at once, so that other requests get their turn."""


def check_vectors(service: Service, *, pairs: bool) -> bool:
    """Check whether the model scores pairs.

    Raises `InvalidRequest` if it makes no vectors, or if it scores pairs and `pairs` is False,
    which asks for vectors of single texts.
    """
    features: frozenset[str] = getattr(service.engine, "features", frozenset())
    if "pooling" not in features:
        problem = "this engine makes no vectors"
    elif "score" in features and not pairs:
        problem = "this model scores pairs of texts; use /rerank or /score"
    else:
        return "score" in features
    raise InvalidRequest(problem, param="model", code="unsupported_model")


async def vectors(
    service: Service,
    inputs: Sequence[Input],
    task: Task,
    *,
    request_id: str,
    priority: int,
    usage: Usage,
    param: str,
) -> list[list[float]]:
    """Return the vector or scores of each input, in order.

    All inputs are checked before the first is submitted. The first error cancels all.
    """
    engine = service.engine
    _check(engine, inputs, param)
    for place, (ids, _) in enumerate(inputs):
        usage.known_prompt(place, len(ids))
    turns = asyncio.Semaphore(IN_WORK)

    async def one(place: int, ids: list[int], second_at: int) -> list[float]:
        async with turns:
            stream = engine.submit(
                ids,
                SamplingParams(),
                request_id=engine_id(f"{request_id}-{place}"),
                priority=priority,
                task=task,
                second_at=second_at,
            )
            try:
                async for delta in stream:
                    check_whole(delta)
                    if isinstance(delta.output, Vector | Scores):
                        return delta.output.values
            finally:
                stream.cancel()
        raise EngineFault("an input ended without a vector")

    works = [
        asyncio.ensure_future(one(place, ids, second_at))
        for place, (ids, second_at) in enumerate(inputs)
    ]
    try:
        return await asyncio.gather(*works)
    finally:
        for work in works:
            work.cancel()
        await asyncio.wait(works)


def _check(engine: ServingEngine, inputs: Sequence[Input], param: str) -> None:
    if not inputs:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequest(
            f"{param} has {len(inputs)} inputs; at most {MAX_INPUTS} are allowed", param=param
        )
    most = engine.max_context
    for place, (ids, _) in enumerate(inputs):
        where = f"{param}.{place}" if len(inputs) > 1 else param
        if not ids:
            raise InvalidRequest("an input is empty", param=where)
        if len(ids) > most:
            raise ContextOverflow(
                f"the input has {len(ids)} tokens; at most {most} are allowed "
                "(truncate_prompt_tokens cuts it)",
                param=where,
            )

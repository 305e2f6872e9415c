from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import InvalidRequest, NotFound, RateLimited
from ...batches.record import UNFINISHED, Batch, new_batch_id
from ...batches.runner import BatchRunner
from ...body import read_model
from ...errors import coded
from ...openapi import replies, takes
from ...service import of
from ...wire import json_response
from ..files.route import files_of, owner_of
from .schema import BatchBody, BatchList, BatchReply

router = APIRouter(tags=["OpenAI"])

MOST_UNFINISHED = 100
"""Batches of one owner that are not done."""


def _runner(request: Request) -> BatchRunner:
    files_of(request)
    runner: BatchRunner = request.app.state.batches
    return runner


def _reply(request: Request, batch: Batch) -> dict[str, object]:
    service = of(request)
    return batch.reply(service.name if service.loaded else service.options.served_name)


@router.post("/v1/batches", responses=replies(BatchReply))
@takes(BatchBody)
async def create(request: Request) -> Response:
    """Begin to do the requests of a file."""
    runner, owner = _runner(request), owner_of(request)
    body = await read_model(request, BatchBody, of(request).options.max_body)
    try:
        file = await runner.files.get(body.input_file_id, owner)
    except NotFound as error:
        raise InvalidRequest(error.message, param="input_file_id") from None
    if file.purpose != "batch":
        raise coded(
            InvalidRequest(f"{file.id} was not uploaded with purpose batch", param="input_file_id"),
            "invalid_purpose",
        )
    unfinished = [one for one in await runner.book.unfinished() if one.owner == owner]
    if len(unfinished) >= MOST_UNFINISHED:
        raise RateLimited(
            f"at most {MOST_UNFINISHED} batches of one key are done at a time", retry_after=60.0
        )
    # One that was begun may go over the quota, so that little work is lost: the bound is here.
    await runner.files.check_quota(owner, param="input_file_id")
    now = int(runner.clock())
    batch = Batch(
        id=new_batch_id(),
        owner=owner,
        endpoint=body.endpoint,
        input_file=file.id,
        window=body.completion_window,
        created=now,
        expires=now + 3600 * int(body.completion_window[:-1]),
        metadata=body.metadata,
        output_file=f"file-{secrets.token_hex(12)}",
        error_file=f"file-{secrets.token_hex(12)}",
    )
    if body.output_expires_after is not None:
        batch.output_expires = body.output_expires_after.seconds
    await runner.book.save(batch)
    runner.start()
    return json_response(_reply(request, batch))


@router.get("/v1/batches", responses=replies(BatchList, bad_query=True))
async def listed(
    request: Request,
    after: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> Response:
    """The caller's batches, newest first."""
    runner = _runner(request)
    found, more = await runner.book.listed(owner_of(request), after=after, limit=limit)
    data = [_reply(request, runner.live(batch)) for batch in found]
    return json_response(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": more,
        }
    )


@router.get("/v1/batches/{batch_id}", responses=replies(BatchReply, body=False, kept=True))
async def retrieve(request: Request, batch_id: str) -> Response:
    """How far a batch is."""
    runner = _runner(request)
    batch = await runner.book.get(batch_id, owner_of(request))
    return json_response(_reply(request, runner.live(batch)))


@router.post("/v1/batches/{batch_id}/cancel", responses=replies(BatchReply))
async def cancel(request: Request, batch_id: str) -> Response:
    """Stop a batch; what is done of it stays."""
    runner = _runner(request)
    batch = runner.live(await runner.book.get(batch_id, owner_of(request)))
    if batch.status in ("cancelling", "cancelled"):
        return json_response(_reply(request, batch))
    if batch.status not in UNFINISHED or batch.status == "finalizing":
        raise coded(
            InvalidRequest(f"the batch is {batch.status} already", param="batch_id"),
            "batch_not_running",
        )
    return json_response(_reply(request, await runner.cancel(batch)))

"""Route `/v1/batches`: many requests in a file, run in the background."""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ...base.errors import InvalidRequest, NotFound, RateLimited
from ..batches.record import UNFINISHED, Batch, Status, new_batch_id
from ..batches.runner import BatchRunner
from ..body import read_model
from ..fields import Body, ListReply
from ..openapi import replies, takes
from ..service import of
from ..wire import json_response
from .files import MAX_EXPIRY, MIN_EXPIRY, files_of, owner_of, page_response

Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
]
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class OutputExpiry(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY, le=MAX_EXPIRY)


class BatchBody(Body):
    input_file_id: str = Field(
        max_length=128, description="Id of an uploaded file with purpose batch."
    )
    endpoint: Endpoint
    completion_window: str = Field(
        pattern=r"^([1-9]|[1-9][0-9]|1[0-5][0-9]|16[0-8])h$",
        description="Time after which unfinished requests expire: 1h to 168h, e.g. 24h.",
    )
    metadata: dict[MetadataKey, MetadataValue] | None = Field(None, max_length=16)
    output_expires_after: OutputExpiry | None = None


class BatchProblem(TypedDict):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(TypedDict):
    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class InputDetails(TypedDict):
    cached_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class BatchUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class BatchReply(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(ListReply):
    data: list[BatchReply]


router = APIRouter(tags=["OpenAI"])

MOST_UNFINISHED = 100
"""Maximum unfinished batches of one owner."""


def _runner(request: Request) -> BatchRunner:
    files_of(request)
    runner: BatchRunner = request.app.state.batches
    return runner


def _reply(request: Request, batch: Batch) -> dict[str, object]:
    service = of(request)
    return batch.reply(
        service.name if service.loaded else next(iter(service.options.served_names), None)
    )


@router.post("/v1/batches", responses=replies(BatchReply))
@takes(BatchBody)
async def create(request: Request) -> Response:
    """Start the requests of a file."""
    runner, owner = _runner(request), owner_of(request)
    body = await read_model(request, BatchBody, of(request).options.max_body)
    try:
        file = await runner.files.get(body.input_file_id, owner)
    except NotFound as error:
        raise InvalidRequest(error.message, param="input_file_id") from None
    if file.purpose != "batch":
        raise InvalidRequest(
            f"{file.id} was not uploaded with purpose batch",
            param="input_file_id",
            code="invalid_purpose",
        )
    unfinished = [one for one in await runner.book.unfinished() if one.owner == owner]
    if len(unfinished) >= MOST_UNFINISHED:
        raise RateLimited(
            f"at most {MOST_UNFINISHED} batches of one key are done at a time", retry_after=60.0
        )
    # A begun batch may exceed the quota, so that little work is lost: the limit is checked here.
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
    """List the caller's batches, newest first."""
    runner = _runner(request)
    found, more = await runner.book.listed(owner_of(request), after=after, limit=limit)
    return page_response([_reply(request, runner.live(batch)) for batch in found], more=more)


@router.get("/v1/batches/{batch_id}", responses=replies(BatchReply, body=False, kept=True))
async def retrieve(request: Request, batch_id: str) -> Response:
    """Return the state of a batch."""
    runner = _runner(request)
    batch = await runner.book.get(batch_id, owner_of(request))
    return json_response(_reply(request, runner.live(batch)))


@router.post("/v1/batches/{batch_id}/cancel", responses=replies(BatchReply))
async def cancel(request: Request, batch_id: str) -> Response:
    """Cancel a batch; finished results are kept."""
    runner = _runner(request)
    batch = runner.live(await runner.book.get(batch_id, owner_of(request)))
    if batch.status in ("cancelling", "cancelled"):
        return json_response(_reply(request, batch))
    if batch.status not in UNFINISHED or batch.status == "finalizing":
        raise InvalidRequest(
            f"the batch is {batch.status} already", param="batch_id", code="batch_not_running"
        )
    return json_response(_reply(request, await runner.cancel(batch)))

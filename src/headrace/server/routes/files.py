"""Route `/v1/files`: input and result files of batches, and pictures."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from ...base.errors import InvalidRequest, NotFound, one_of
from ..fields import ListReply
from ..files.form import FormReader, Part, boundary_of
from ..files.store import Arriving, FileStore, StoredFile
from ..openapi import raw, replies, takes_form
from ..wire import json_response

MIN_EXPIRY, MAX_EXPIRY = 3600, 2_592_000
"""Seconds, as in OpenAI's API: one hour to 30 days."""

PURPOSES = ("batch", "vision", "user_data")
"""Purposes of uploads; the last two are pictures that `/v1/responses` takes by id."""

UPLOAD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {
            "type": "string",
            "format": "binary",
            "description": "JSONL, one request per line; or a picture.",
        },
        "purpose": {"type": "string", "enum": [*PURPOSES]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRY,
            "maximum": MAX_EXPIRY,
            "description": "Absent: the file is kept until it is deleted.",
        },
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
"""Schema of the upload form."""


class FileReply(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: NotRequired[int]
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(ListReply):
    data: list[FileReply]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


router = APIRouter(tags=["OpenAI"])

MOST_LISTED = 10_000


class NoFiles(NotFound):
    code = "files_off"


def files_of(request: Request) -> FileStore:
    """Return the server's files. Raises `NotFound` if it keeps none."""
    files: FileStore | None = request.app.state.files
    if files is None:
        raise NoFiles("this server keeps no files (option files)")
    return files


def owner_of(request: Request) -> str:
    owner: str = request.scope.get("headrace.owner", "")
    return owner


def page_response(data: Sequence[Mapping[str, Any]], *, more: bool) -> Response:
    """Build one page of a list, as OpenAI's clients read it."""
    first, last = (data[0].get("id"), data[-1].get("id")) if data else (None, None)
    ends = {"first_id": first, "last_id": last, "has_more": more}
    return json_response({"object": "list", "data": data, **ends})


def reply_of(file: StoredFile) -> FileReply:
    reply: FileReply = {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
    if file.expires is not None:
        reply["expires_at"] = file.expires
    return reply


@router.post("/v1/files", responses=replies(FileReply))
@takes_form(UPLOAD)
async def upload(request: Request) -> Response:
    """Store a file: the requests of a batch, or a picture."""
    files = files_of(request)
    boundary = boundary_of(request.headers.get("content-type", ""))
    arriving = await files.receive(owner_of(request))
    try:
        filename, fields = await _read(request, boundary, arriving)
        purpose = fields.get("purpose", "absent")
        one_of(purpose, PURPOSES, "purpose")
        if filename is None:
            raise InvalidRequest(
                "file is required", param="file", code="missing_required_parameter"
            )
        expires = _expiry(fields)
        stored = await arriving.keep(filename, purpose, expires)
        return json_response(reply_of(stored))
    finally:
        arriving.close()


async def _read(
    request: Request, boundary: bytes, arriving: Arriving
) -> tuple[str | None, dict[str, str]]:
    """Read the form; return (name of the file, or None if it has no file; other fields)."""
    reader = FormReader(_chunks(request), boundary)
    filename: str | None = None
    fields: dict[str, str] = {}
    while (part := await reader.part()) is not None:
        if part.name in fields or (part.name == "file" and filename is not None):
            raise InvalidRequest(f"{part.name[:100]} is there twice", param=part.name[:100])
        if part.name == "file":
            filename = _safe_name(part)
            async for piece in reader.data():
                await arriving.write(piece)
        elif part.name in UPLOAD["properties"]:
            fields[part.name] = await reader.field(part.name)
        else:
            name = part.name[:100]
            raise InvalidRequest(
                f"{name} is not a known parameter", param=name, code="unknown_parameter"
            )
    return filename, fields


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
        yield chunk


def _safe_name(part: Part) -> str:
    """Return the last component of the client's file name: it is displayed, never used as a
    path."""
    name = (part.filename or "file").replace("\\", "/").rpartition("/")[2]
    return "".join(char for char in name if char.isprintable())[:255] or "file"


def _expiry(fields: dict[str, str]) -> int | None:
    """Return the expiry in seconds since the epoch, or None. Raises `InvalidRequest`."""

    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest(
            "expires_after[anchor] must be created_at", param="expires_after[anchor]"
        )
    if (
        seconds is None
        or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10)
        or not MIN_EXPIRY <= int(seconds) <= MAX_EXPIRY
    ):
        raise InvalidRequest(
            f"expires_after[seconds] must be an integer from {MIN_EXPIRY} to {MAX_EXPIRY}",
            param="expires_after[seconds]",
        )
    return int(time.time()) + int(seconds)


@router.get("/v1/files", responses=replies(FileList, bad_query=True))
async def listed(
    request: Request,
    purpose: Annotated[str | None, Query(max_length=64)] = None,
    after: Annotated[str | None, Query(max_length=128)] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = MOST_LISTED,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the caller's files."""
    found, more = await files_of(request).listed(
        owner_of(request), purpose=purpose, after=after, limit=limit, newest=order == "desc"
    )
    return page_response([reply_of(file) for file in found], more=more)


@router.get("/v1/files/{file_id}", responses=replies(FileReply, body=False))
async def retrieve(request: Request, file_id: str) -> Response:
    """Return a file's metadata."""
    return json_response(reply_of(await files_of(request).get(file_id, owner_of(request))))


@router.get(
    "/v1/files/{file_id}/content", responses=raw("application/octet-stream", also=(404, 503))
)
async def content(request: Request, file_id: str) -> Response:
    """Return the content of a file."""
    files = files_of(request)
    file = await files.get(file_id, owner_of(request))
    try:
        descriptor = os.open(files.path(file.id), os.O_RDONLY)
    except FileNotFoundError:
        raise NotFound(f"the content of {file.id} is gone", param="file_id") from None
    return _HeldFile(descriptor, file.filename)


class _HeldFile(FileResponse):
    """Response with a file opened when found, so that a deletion meanwhile does not cut it off.

    It is sent as a download, never for display: an uploaded page must not run as a page of ours.
    """

    def __init__(self, descriptor: int, filename: str) -> None:
        self._descriptor = descriptor
        super().__init__(
            f"/dev/fd/{descriptor}",
            media_type="application/octet-stream",
            filename=filename,
            headers={"x-content-type-options": "nosniff"},
            stat_result=os.fstat(descriptor),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._descriptor)


@router.delete("/v1/files/{file_id}", responses=replies(DeletedFile, body=False))
async def delete(request: Request, file_id: str) -> Response:
    """Delete a file. A batch that still reads it ends with its results so far."""
    if not await files_of(request).delete(file_id, owner_of(request)):
        raise NotFound(f"there is no file {file_id[:128]!r}", param="file_id")
    return json_response({"id": file_id, "object": "file", "deleted": True})

"""Bodies of `/v1/files`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

MIN_EXPIRY, MAX_EXPIRY = 3600, 2_592_000
"""Seconds, as OpenAI has them: an hour to 30 days."""

UPLOAD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "JSONL, one request a line."},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": MIN_EXPIRY,
            "maximum": MAX_EXPIRY,
            "description": "Absent: it is kept until it is deleted.",
        },
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}
"""The form of an upload."""


class FileReply(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: NotRequired[int]
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(TypedDict):
    object: Literal["list"]
    data: list[FileReply]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool

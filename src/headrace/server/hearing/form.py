"""Form of a transcription request, bounded while it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from ...base.errors import InvalidRequest, TooLarge
from ...base.foreign import Undecodable, any_json
from ..body import BodiesInFlight, converted, needed
from ..caller import BODY_SIZE
from ..files.form import FormReader, boundary_of

MOST_BESIDE = 64 * 1024
"""Bytes of a form in addition to its file."""
MOST_PROMPT = 16 * 1024
"""Bytes of a prompt; Whisper uses only its last 223 tokens."""
MOST_PARTS = 24


class VadFields(BaseModel):
    """OpenAI's `server_vad`."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["server_vad"]
    threshold: float = Field(0.5, ge=0, le=1)
    prefix_padding_ms: int = Field(210, ge=0, le=5_000)
    silence_duration_ms: int = Field(500, ge=30, le=10_000)


class AudioForm(BaseModel):
    """Fields of a transcription or a translation."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    language: str | None = Field(None, max_length=40)
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: float = Field(0.0, ge=0, le=1)
    timestamp_granularities: list[Literal["word", "segment"]] = Field(default_factory=list)
    include: list[Literal["logprobs"]] = Field(default_factory=list)
    stream: bool = False
    chunking_strategy: Literal["auto"] | VadFields | None = None

    def check(self) -> None:
        """Raise `InvalidRequest` for fields that exclude each other."""
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise InvalidRequest(
                "timestamp_granularities needs response_format verbose_json",
                param="timestamp_granularities",
            )
        if self.include and self.response_format != "json":
            raise InvalidRequest("include needs response_format json", param="include")
        if self.stream and self.response_format in ("srt", "vtt"):
            raise InvalidRequest(
                "stream needs response_format json, text or verbose_json", param="response_format"
            )


_LISTS = ("timestamp_granularities", "include")
_PARTS = {"chunking_strategy": VadFields}


async def read_form(request: Request, most: int) -> tuple[bytearray, AudioForm]:
    """Read the file's bytes and the fields.

    `most`: bytes of the file. Raises `UnsupportedMediaType`, `TooLarge`, `Overloaded`,
    `InvalidRequest`, and `ClientDisconnect`.
    """
    boundary = boundary_of(request.headers.get("content-type", ""))
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most + MOST_BESIDE:
        raise _too_large(most)
    reader = FormReader(_counted(request, most + MOST_BESIDE), boundary, most_parts=MOST_PARTS)
    file: bytearray | None = None
    fields: dict[str, Any] = {}
    while (part := await reader.part()) is not None:
        if part.name == "file":
            if file is not None:
                raise InvalidRequest("file must be given once", param="file")
            file = bytearray()
            async for piece in reader.data():
                file += piece
                if len(file) > most:
                    raise _too_large(most)
        else:
            text = await reader.field(part.name, MOST_PROMPT if part.name == "prompt" else None)
            _put(fields, part.name, text)
    if file is None:
        needed(None, "file")
    assert file is not None
    BODY_SIZE.set(len(file))
    form = converted(fields, AudioForm)
    form.check()
    return file, form


async def _counted(request: Request, most: int) -> AsyncIterator[bytes]:
    bodies: BodiesInFlight = request.app.state.service.bodies
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise TooLarge(f"the form is larger than the {most:,} bytes that are allowed")
        bodies.take(request.scope, len(part))
        if part:
            yield part


def _put(fields: dict[str, Any], name: str, text: str) -> None:
    """Add a form field: a[] adds to a list, a[b] sets a member of an object."""
    base, bracket, key = name.partition("[")
    key = key.removesuffix("]")
    if base in _LISTS and key == "":
        fields.setdefault(base, []).append(text)
    elif bracket and key and base in _PARTS:
        held = fields.setdefault(base, {})
        if not isinstance(held, dict):
            raise InvalidRequest(f"{base} is given in two ways", param=base)
        held[key] = text
    elif bracket:
        fields[base] = text  # The field is unknown: the error must show its name.
    elif name in fields:
        raise InvalidRequest(f"{name[:100]} must be given once", param=name[:100])
    elif base in _PARTS and text.startswith("{"):
        try:
            fields[name] = any_json(text)
        except Undecodable:
            raise InvalidRequest(f"{base} is not valid JSON", param=base) from None
    elif text or name == "prompt":
        fields[name] = text


def _too_large(most: int) -> TooLarge:
    return TooLarge(f"the file has more than the {most:,} bytes that are taken", param="file")

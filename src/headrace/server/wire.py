"""JSON output: msgspec for everything that is sent, and the frames of server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Many:
    """JSON list whose items are made as they are written (`written`), once and in order."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


_encoder = msgspec.json.Encoder()
encode = _encoder.encode
"""Encode any plain value as UTF-8 JSON."""

TURN = 0.004
"""Seconds of writing one large value, after which other tasks get their turn."""
PART = 128 * 1024
"""Bytes of a part of a body."""
BATCH = 32
"""Items of a list that are encoded at once."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def frame(value: Any) -> bytes:
    """Encode one event of a stream."""
    return b"data: " + encode(value) + b"\n\n"


def named_frame(name: str, value: Any) -> bytes:
    """Encode one named event, as in the Responses and Messages interfaces."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        encode(value), status_code=status, headers=headers, media_type="application/json"
    )


async def written(value: Any) -> list[bytes]:
    """Encode a possibly large value in parts, so that other tasks get their turn."""
    parts: list[bytes] = []
    part = bytearray()
    begun = time.monotonic()
    for piece in _pieces(value, lists=2):
        part += piece
        if len(part) > PART:
            parts.append(bytes(part))
            part.clear()
        if time.monotonic() - begun > TURN:
            await asyncio.sleep(0)
            begun = time.monotonic()
    return [*parts, bytes(part)]


class _Parts(Response):
    """Response sent part by part: copying megabytes at once would block the event loop."""

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__(media_type="application/json")
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        for place, part in enumerate(self._parts, start=1):
            more = place < len(self._parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})
            await asyncio.sleep(0)


async def large_response(value: Any) -> Response:
    """Do as `json_response`, for values that may be large or hold `Many`."""
    return _Parts(await written(value))


class Large:
    """An event that may be large or hold `Many`, and the small events that follow it."""

    __slots__ = ("_following", "_value")

    def __init__(self, value: Any, following: bytes = b"") -> None:
        self._value, self._following = value, following

    async def written(self) -> bytes:
        return b"".join([b"data: ", *await written(self._value), b"\n\n", self._following])


def _pieces(value: Any, lists: int) -> Iterator[bytes]:
    """Yield the JSON text in small pieces.

    `lists`: levels of nested lists that are split into items. Objects in them are as long as one
    choice, so the entries of the innermost lists are encoded whole.
    """
    match value:
        case dict() if lists:
            mark = b"{"
            for key, inner in value.items():
                yield b"%b%b:" % (mark, encode(key))
                yield from _pieces(inner, lists)
                mark = b","
            yield b"}" if value else b"{}"
        case list() | Many() if lists:
            items, mark = iter(value), b"["
            while batch := list(islice(items, BATCH)):
                if isinstance(batch[0], dict) and lists > 1 and isinstance(value, list):
                    for item in batch:
                        yield mark
                        yield from _pieces(item, lists - 1)
                        mark = b","
                else:
                    yield mark + encode(batch)[1:-1]
                    mark = b","
            yield b"]" if mark == b"," else b"[]"
        case _:
            yield encode(value)

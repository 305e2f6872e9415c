"""JSON out: msgspec for everything that is sent, and the frames of server-sent events."""

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
    """A JSON list whose items are made as they are written (`written`), once and in order."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


_encoder = msgspec.json.Encoder()
encode = _encoder.encode
"""Any plain value → UTF-8 JSON."""

TURN = 0.004
"""Seconds of writing one large value, after which whatever else waits gets its turn."""
PART = 128 * 1024
"""Bytes of a part of a body."""
BATCH = 32
"""Items of a list that are written at once."""

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def frame(value: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + encode(value) + b"\n\n"


def named_frame(name: str, value: Any) -> bytes:
    """One event with a name, as the Responses and Messages interfaces send them."""
    return b"event: " + name.encode() + b"\ndata: " + encode(value) + b"\n\n"


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        encode(value), status_code=status, headers=headers, media_type="application/json"
    )


async def written(value: Any) -> list[bytes]:
    """Like `encode`, in parts, for what may be large: others get their turn while it is written."""
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
    """A body that is sent part by part: one of megabytes is copied for a while."""

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
    """`json_response` for what may be large, or holds `Many`."""
    return _Parts(await written(value))


class Large:
    """An event that may be large, or holds `Many`, and the small ones behind it."""

    __slots__ = ("_behind", "_value")

    def __init__(self, value: Any, behind: bytes = b"") -> None:
        self._value, self._behind = value, behind

    async def written(self) -> bytes:
        return b"".join([b"data: ", *await written(self._value), b"\n\n", self._behind])


def _pieces(value: Any, lists: int) -> Iterator[bytes]:
    """The text in small pieces. `lists`: how deep lists are gone into, of what they hold; objects
    in them are as long as a choice is, so the entries of the innermost lists are taken whole."""
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

"""Request bodies: bounded while they arrive, checked for parse cost, parsed once; every mistake is
a typed error."""

from __future__ import annotations

from array import array
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ..base.errors import InvalidRequest, TooLarge
from ..base.foreign import Undecodable, json_reader
from ..base.shares import Shares
from ..base.weight import LIGHT, Weight, weigh
from .caller import BODY_SIZE, CALLER
from .errors import UnsupportedMediaType, from_validation

if TYPE_CHECKING:
    from .hands import Hands

PIECE = 16 * 1024
"""Bytes of an id list that are parsed at once. An id takes two to seven bytes in a body and four in
an array. As an integer in a Python list it takes forty, and as much again while pydantic parses it.
So ids are extracted before the rest is parsed."""
UNTYPED = ("", "application/x-www-form-urlencoded")
"""Content types that LiteLLM and plain curl send to Ollama's routes for JSON. `origin` keeps out
pages of other sites, whatever type they send."""
_fields = json_reader(dict[str, msgspec.Raw])
_numbers = json_reader(list[Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]])
_encode = msgspec.json.encode


def take_ids(
    body: bytes | bytearray, name: str
) -> tuple[bytes, array[int] | list[array[int]]] | None:
    """Extract the ids in the field `name`: a list of ids, or of such lists.

    Returns (body with a shorter list in that field, ids), or None if the field holds anything else
    or the body is invalid. In that case parsing reports the error.
    """
    try:
        fields = _fields(body)
        if name not in fields:
            return None
        text = memoryview(fields[name])
        nested = bytes(text[1:PIECE]).lstrip()[:1] == b"["
        ids = _nested(bytes(text)) if nested else _flat(text)
    except Undecodable:
        return None
    if not ids:
        return None
    fields[name] = msgspec.Raw(b"[0]" if isinstance(ids, array) else b"[[0]]")
    return _encode(fields), ids


def _flat(text: memoryview) -> array[int]:
    """Parse a list of numbers."""
    if bytes(text[:1]) != b"[":
        raise Undecodable("not a list")
    ids = array("i")
    start, end = 1, len(text) - 1
    while start < end:
        piece = bytes(text[start : min(start + PIECE, end)])
        if start + PIECE < end:
            cut = piece.rfind(b",")
            if cut <= 0:
                raise Undecodable("not ids")
            piece = piece[:cut]
        ids.extend(_numbers(b"[%b]" % piece))
        start += len(piece) + 1
    return ids


def _nested(text: bytes) -> list[array[int]]:
    """Parse the numbers of each list in a list."""
    found: list[array[int]] = []
    end = text.rindex(b"]")
    start = 1
    while (close := text.find(b"]", start, end)) >= 0:
        opening = text.find(b"[", start, close)
        if opening < 0 or text[start:opening].strip(b" \t\r\n,"):
            raise Undecodable("not a list of lists")
        found.append(_flat(memoryview(text)[opening : close + 1]))
        start = close + 1
    if text[start:end].strip():
        raise Undecodable("not a list of lists")
    return found


Model = TypeVar("Model", bound=BaseModel)

MOST = Weight(containers=10_240, values=32_768, numbers=400_000)
"""Parse-cost limit of a body: parsing takes less than 50 ms, in which nothing else runs. A message
costs about 4 µs, a value 1 µs, a number 0.1 µs. A conversation of a thousand turns has 3,000
objects."""
IN_FLIGHT = 256 * 2**20
"""Total bytes of all bodies of unanswered requests and all samples of sessions. A text takes up to
three times its size after parsing. Many small values take more, but at most 20 MiB."""


MOST_SESSIONS = 128
"""Maximum live sessions of a server; one key may have half of them."""


class BodiesInFlight:
    """Bytes from clients that are held: bodies of requests, samples of sessions."""

    def __init__(self, most: int = IN_FLIGHT) -> None:
        self._shares = Shares(most, "the requests in work hold as many bytes as are allowed")
        self.sessions = Shares(MOST_SESSIONS, "as many sessions are open as are allowed")
        """Live transcription sessions of all models."""

    @property
    def held(self) -> int:
        return self._shares.held

    def take(self, scope: MutableMapping[str, Any], size: int) -> None:
        """Hold `size` more bytes for this scope's request. Raises `Overloaded`."""
        owner = CALLER.get().owner
        self._shares.take(owner, size)
        _, before = scope.get("headrace.held", ("", 0))
        scope["headrace.held"] = owner, before + size

    def give(self, scope: MutableMapping[str, Any], size: int | None = None) -> None:
        """Release `size` bytes of this scope's request; None: all of them, because it was
        answered."""
        owner, held = scope.pop("headrace.held", ("", 0))
        given = held if size is None else min(size, held)
        if held > given:
            scope["headrace.held"] = owner, held - given
        self._shares.give(owner, given)


async def read_body(request: Request, limit: int) -> bytearray:
    """Read the body; refuse it once it is announced to be, or grows, longer than `limit` bytes.

    Raises `TooLarge`, `Overloaded` if requests hold too much (`BodiesInFlight`), and Starlette's
    `ClientDisconnect` if the client leaves before the end.
    """
    announced = request.headers.get("content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    bodies: BodiesInFlight = request.app.state.service.bodies
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > limit:
            raise _too_large(limit)
        bodies.take(request.scope, len(part))
        body += part
    BODY_SIZE.set(len(body))
    return body


async def read_model(request: Request, model: type[Model], limit: int) -> Model:
    """Read the body as a `model`; raise `TooLarge`, `UnsupportedMediaType` or `InvalidRequest`.

    Only JSON content types are accepted. Browsers send other types across origins without a
    preflight, so accepting them would let any web page use a server on the reader's own machine.
    """
    return parse(await read_json(request, limit), model)


async def read_json(request: Request, limit: int) -> bytearray:
    """Read the unparsed body of a JSON request and check its parse cost.

    Raises `TooLarge`, `UnsupportedMediaType` and the errors of `read_body`.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    typed = content_type == "application/json" or content_type.endswith("+json")
    if not typed and not (request.scope["path"].startswith("/api/") and content_type in UNTYPED):
        raise UnsupportedMediaType(
            f"the content type must be application/json, not {content_type[:100] or 'absent'}"
        )
    body = await read_body(request, limit)
    if len(body) > LIGHT:
        hands: Hands = request.app.state.service.hands
        (await hands.run(weigh, body)).verify(MOST, "the body")
    return body


def parse(body: bytes | bytearray, model: type[Model]) -> Model:
    """Parse a body; raise `InvalidRequest` with the path of the first wrong field.

    If the body is not light, the ids of its field `IDS` are returned as arrays.
    """
    name: str | None = getattr(model, "IDS", None)
    taken = take_ids(body, name) if name is not None and len(body) > LIGHT else None
    if taken is None or name is None:
        return _parsed(body, model)
    rest, ids = taken
    made = _parsed(rest, model)
    setattr(made, name, ids)
    return made


def _parsed(body: bytes | bytearray, model: type[Model]) -> Model:
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


def converted(value: dict[str, Any], model: type[Model]) -> Model:
    """Build a body from that of another interface; raise `InvalidRequest` as `parse` does."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than the {limit} bytes that are allowed (max_body)")


def needed(value: str | None, where: str) -> str:
    if value is None:
        raise InvalidRequest(f"{where} is required", param=where)
    return value

"""Request bodies: bounded while they arrive, parsed once, every mistake a typed error."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ..base.errors import TooLarge
from .errors import UnsupportedMediaType, from_validation

Model = TypeVar("Model", bound=BaseModel)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is announced or grows longer than `limit` bytes.

    Raises `TooLarge`, and Starlette's `ClientDisconnect` where the client leaves half-way.
    """
    announced = request.headers.get("content-length")
    if announced is not None and announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


async def read_model(request: Request, model: type[Model], limit: int) -> Model:
    """The body as a `model`; raises `TooLarge`, `UnsupportedMediaType` or `InvalidRequest`.

    Only JSON content types are taken: a browser sends others across origins without asking first,
    so accepting them would let any web page use a server on the reader's own machine.
    """
    return parse(await read_json(request, limit), model)


async def read_json(request: Request, limit: int) -> bytes:
    """The body of a JSON request, unparsed; raises `TooLarge` or `UnsupportedMediaType`."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise UnsupportedMediaType(
            f"the content type must be application/json, not {content_type[:100] or 'absent'}"
        )
    return await read_body(request, limit)


def parse(body: bytes, model: type[Model]) -> Model:
    """Raises `InvalidRequest` with the path of the first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


def converted(value: dict[str, Any], model: type[Model]) -> Model:
    """A body made from that of another interface; raises `InvalidRequest` as `parse` does."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than the {limit} bytes that are allowed (max_body)")

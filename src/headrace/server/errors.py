"""Errors in the format of OpenAI's clients: {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from ..base.errors import HeadraceError, InvalidRequest
from .wire import encode

MAX_SHOWN = 200
"""Characters of a user's value that a message may repeat."""


MAX_PROBLEMS = 1000
"""Number of wrong fields in a body above which no path is reported."""


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


def code_of(error: HeadraceError) -> str | None:
    """Return the error code for the client and the log."""
    return error.code or ("invalid_value" if error.status == 400 and error.param else None)


def error_body(error: HeadraceError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": code_of(error),
        }
    }


def error_headers(error: HeadraceError) -> dict[str, str]:
    """Return `Retry-After` in whole seconds, at least 1, for every 429 and 503."""
    if error.status in (429, 503) or error.retry_after is not None:
        return {"retry-after": str(max(1, math.ceil(error.retry_after or 1.0)))}
    return {}


def error_response(error: HeadraceError) -> Response:
    return Response(
        encode(error_body(error)),
        status_code=error.status,
        headers=error_headers(error),
        media_type="application/json",
    )


def inference_error(error: HeadraceError) -> Response:
    """Return an error in the format of KServe v2, with fields of our own."""
    fields = {"error": error.message, "type": error.type, "param": error.param}
    return Response(
        encode(fields | {"code": code_of(error)}),
        status_code=error.status,
        headers=error_headers(error),
        media_type="application/json",
    )


def internal_error() -> HeadraceError:
    """Return the client's view of a bug: no internals; the log has the traceback."""
    return HeadraceError("internal error; the server's log has the details")


_WORDS = {
    "missing": "is required",
    "extra_forbidden": "is not a known parameter",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_parsing_size": "is out of range",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}


def from_validation(error: ValidationError) -> InvalidRequest:
    """Return the first error, with the path of its field as `param`.

    For a union pydantic reports each member's error; the one with the deepest path belongs to the
    member that the user meant.
    """
    if error.error_count() > MAX_PROBLEMS:  # Listing them all would take long.
        message = f"the body has {error.error_count()} wrong or unknown fields"
        return InvalidRequest(message, code="invalid_value")
    problems = error.errors(include_url=False, include_context=True, include_input=False)
    first = max(
        enumerate(problems),
        key=lambda pair: (
            pair[1]["loc"][:1] == problems[0]["loc"][:1],
            len(_path(pair[1]["loc"])),
            -pair[0],
        ),
    )[1]
    kind = first["type"]
    if kind == "json_invalid":
        detail = str(first.get("ctx", {}).get("error", "invalid"))[:MAX_SHOWN]
        return InvalidRequest(f"the body is not valid JSON: {detail}", code="invalid_json")
    cause = first.get("ctx", {}).get("error")
    path = _path(first["loc"])
    if isinstance(cause, ValueError) and cause.args and isinstance(cause.args[0], InvalidRequest):
        return _placed(cause.args[0], path)
    name = ".".join(str(part) for part in path)[:MAX_SHOWN]
    if not name:
        return InvalidRequest("the body must be a JSON object", code="invalid_body")
    words = _WORDS.get(kind)
    for side, bound in (("least", "min_length"), ("most", "max_length")):
        if kind in ("too_short", "too_long") and bound in first.get("ctx", {}):
            most = first["ctx"][bound]
            words = f"must have at {side} {most} item{'' if most == 1 else 's'}"
    if words is None:
        message = first["msg"]
        for prefix in ("Value error, ", "Assertion failed, "):
            message = message.removeprefix(prefix)
        words = f"is wrong: {message[:1].lower()}{message[1:MAX_SHOWN]}"
    code = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
    return InvalidRequest(f"{name} {words}", param=name, code=code.get(kind, "invalid_value"))


def _placed(error: InvalidRequest, path: list[int | str]) -> InvalidRequest:
    """Return the error of an object inside the body, with the whole path of its field."""
    name = error.param or ""
    whole = ".".join(str(part) for part in (*path, name) if part != "")[:MAX_SHOWN]
    message = error.message
    if name and message.startswith(name):
        message = whole + message[len(name) :]
    return InvalidRequest(message, param=whole or None, code=error.code)


def _path(location: tuple[int | str, ...]) -> list[int | str]:
    """Return the location without the names that pydantic gives to the members of a union."""
    return [
        part
        for part in location
        if isinstance(part, int) or (part.replace("_", "").isalnum() and part.lower() == part)
        if part not in ("str", "int", "float", "bool")
        if not (isinstance(part, str) and part.startswith(("list[", "dict[", "function-")))
    ]

"""OpenAPI document: exact, although bodies are parsed by hand (`body.read_model`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, get_args

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from typing_extensions import TypedDict

from ..base.version import VERSION

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """Body of every answer whose status is 400 or more."""

    error: ErrorDetail


def takes(model: Any) -> Callable[[Endpoint], Endpoint]:
    """Mark an endpoint: its JSON body is a `model`, or one of several (a union)."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.__headrace_body__ = model  # type: ignore[attr-defined]
        return endpoint

    return mark


def takes_form(schema: dict[str, Any]) -> Callable[[Endpoint], Endpoint]:
    """Mark an endpoint: its body is a form (`multipart/form-data`) of this schema."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.__headrace_form__ = schema  # type: ignore[attr-defined]
        return endpoint

    return mark


def refuses(reason: str) -> Callable[[Endpoint], Endpoint]:
    """Mark an endpoint that answers every request with an error; `reason`: for the documents."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.__headrace_refuses__ = reason  # type: ignore[attr-defined]
        return endpoint

    return mark


class AnthropicDetail(TypedDict):
    type: str
    message: str


class AnthropicError(TypedDict):
    """Body of an error on the routes for Anthropic's clients."""

    type: Literal["error"]
    error: AnthropicDetail


ERRORS = {
    400: "The request is wrong; `param` names the field.",
    404: "The model, or the object, does not exist here.",
    413: "The body is larger than allowed.",
    415: "The body is not JSON.",
    429: "A limit of this caller is reached.",
    500: "The step that computed it failed, or a bug; the log has the details.",
    503: "Full, loading or shutting down; see Retry-After.",
}


FOREIGN = {
    "description": "A page of another site sends it (option cors_origins).",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorReply"}}},
}
"""Response that every route with side effects may give (`origin`)."""

OWN_ERRORS = {
    "/v1/messages": "AnthropicError", "/api/": "OllamaError", "/v2/models": "InferenceError",
}  # fmt: skip
"""Paths whose errors have their own format, and its name in the document."""

READ_ERRORS = (404, 503)
"""Error statuses of routes without a body."""


def replies(
    reply: Any,
    *,
    stream: bool = False,
    body: bool = True,
    error: Any = ErrorReply,
    bad_query: bool = False,
    kept: bool = False,
) -> dict[int | str, Any]:
    """Build the `responses` of a route: its answer, also as a stream, and the errors.

    `body`: it takes a body, which may be wrong in more ways. `bad_query`: it takes only a query,
    which may be wrong too. `kept`: it reads stored data, which may be damaged. `error`: the format
    of errors.
    """
    success: dict[str, Any] = {"model": reply}
    if stream:
        success["content"] = {"text/event-stream": {}}
        success["description"] = "The answer, or with stream: true its events."
    found: dict[int | str, Any] = {200: success}
    for status, words in ERRORS.items():
        wrong = (bad_query and status == 400) or (kept and status == 500)
        if (body and not bad_query) or status in READ_ERRORS or wrong:
            found[status] = {"model": error, "description": words}
    return found


def health(*also: int, error: Any = ErrorReply) -> dict[int | str, Any]:
    """Build the `responses` of a probe: an object for every status. `error`: as of `replies`."""
    unready = {"description": "Not now.", "model": dict[str, Any]}
    found: dict[int | str, Any] = {200: {"model": dict[str, Any]}, 503: unready}
    for status in also:
        found[status] = {"model": error, "description": ERRORS[status]}
    return found


def raw(*kinds: str, also: Sequence[int] = ()) -> dict[int | str, Any]:
    """Build the `responses` of a route that does not answer JSON: media types and errors."""
    found: dict[int | str, Any] = {
        200: {"description": "The content.", "content": {kind: {} for kind in kinds}}
    }
    for status in also:
        found[status] = {"model": ErrorReply, "description": ERRORS[status]}
    return found


def document(
    app: FastAPI, routers: Sequence[APIRouter], secured: Callable[[str], bool] | None = None
) -> dict[str, Any]:
    """Return the OpenAPI document of the application's routers, made once.

    `secured` is set if there are keys; it says which paths need one.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    schema = get_openapi(
        title="Headrace",
        version=VERSION,
        description="OpenAI-compatible inference. Unknown fields of a request are errors; hints "
        "that cannot be seen in the answer are accepted (docs/fields.md).",
        routes=app.routes,
    )
    definitions = schema.setdefault("components", {}).setdefault("schemas", {})
    for path in schema["paths"].values():
        for method, operation in path.items():
            _exact(operation)
            if method not in ("get", "head", "options"):
                operation["responses"].setdefault("403", FOREIGN)
    for name in ("HTTPValidationError", "ValidationError"):
        definitions.pop(name, None)
    for route in (route for router in routers for route in router.routes):
        endpoint = getattr(route, "endpoint", None)
        form = getattr(endpoint, "__headrace_form__", None)
        if form is not None:
            schema["paths"][getattr(route, "path", "")]["post"]["requestBody"] = {
                "required": True,
                "content": {"multipart/form-data": {"schema": form}},
            }
        model = getattr(endpoint, "__headrace_body__", None)
        if model is None:
            continue
        references = []
        for member in get_args(model) or (model,):
            body = member.model_json_schema(ref_template="#/components/schemas/{model}")
            definitions.update(body.pop("$defs", {}))
            definitions[member.__name__] = body
            references.append({"$ref": f"#/components/schemas/{member.__name__}"})
        reference = references[0] if len(references) == 1 else {"anyOf": references}
        for method in getattr(route, "methods", ()):
            operation = schema["paths"][getattr(route, "path", "")][method.lower()]
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": reference}},
            }
    if secured:
        _secure(schema, secured)
    app.openapi_schema = schema
    return schema


def _exact(operation: dict[str, Any]) -> None:
    """Remove FastAPI's own 422, and the empty JSON entry of routes that answer something else."""
    found = operation["responses"]
    found.pop("422", None)
    content = found.get("200", {}).get("content", {})
    if len(content) > 1 and content.get("application/json") == {"schema": {}}:
        del content["application/json"]


def _secure(schema: dict[str, Any], closed: Callable[[str], bool]) -> None:
    """Add to every closed route its security scheme and the answers to a missing or wrong key."""
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    reference = {"schema": {"$ref": "#/components/schemas/ErrorReply"}}
    for path, operations in schema["paths"].items():
        if not closed(path):
            continue
        own = next((name for root, name in OWN_ERRORS.items() if path.startswith(root)), None)
        shape = {"schema": {"$ref": f"#/components/schemas/{own}"}} if own else reference
        content = {"application/json": shape}
        for operation in operations.values():
            operation["security"] = [{"key": []}]
            for status, words in ((401, "No key, or an unknown one."), (403, "Not for this key.")):
                operation["responses"][str(status)] = {"description": words, "content": content}

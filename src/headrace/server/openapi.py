"""The API's document: exact, although bodies are read by hand (`body.read_model`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from typing_extensions import TypedDict

from ..base.version import VERSION

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(TypedDict):
    """The body of every answer whose status is 400 or more."""

    error: ErrorDetail


def takes(model: type[BaseModel]) -> Callable[[Endpoint], Endpoint]:
    """Mark an endpoint: its JSON body is a `model`."""

    def mark(endpoint: Endpoint) -> Endpoint:
        endpoint.__headrace_body__ = model  # type: ignore[attr-defined]
        return endpoint

    return mark


ERRORS = {
    400: "The request is wrong; `param` names the field.",
    404: "The model, or the object, does not exist here.",
    413: "The body is larger than allowed.",
    415: "The body is not JSON.",
    429: "A limit of this caller is reached.",
    503: "Full, loading or shutting down; see Retry-After.",
}


def replies(reply: Any, *, stream: bool = False, errors: bool = True) -> dict[int | str, Any]:
    """The `responses` of a route: its answer, as a stream too, and the errors."""
    success: dict[str, Any] = {"model": reply}
    if stream:
        success["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
        success["description"] = "The answer, or with stream: true its events."
    found: dict[int | str, Any] = {200: success}
    if errors:
        for status, words in ERRORS.items():
            found[status] = {"model": ErrorReply, "description": words}
    return found


def document(app: FastAPI, routers: Sequence[APIRouter]) -> dict[str, Any]:
    """The OpenAPI document of the application's routers, made once."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    schema = get_openapi(
        title="Headrace",
        version=VERSION,
        description="OpenAI-compatible inference. Unknown and unsupported fields are errors.",
        routes=app.routes,
    )
    definitions = schema.setdefault("components", {}).setdefault("schemas", {})
    for route in (route for router in routers for route in router.routes):
        model = getattr(getattr(route, "endpoint", None), "__headrace_body__", None)
        if model is None:
            continue
        body = model.model_json_schema(ref_template="#/components/schemas/{model}")
        definitions.update(body.pop("$defs", {}))
        definitions[model.__name__] = body
        reference = {"$ref": f"#/components/schemas/{model.__name__}"}
        for method in getattr(route, "methods", ()):
            operation = schema["paths"][getattr(route, "path", "")][method.lower()]
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": reference}},
            }
    app.openapi_schema = schema
    return schema

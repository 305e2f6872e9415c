from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import InvalidRequest, NotFound, one_of
from ...entry import entered
from ...openapi import refuses, replies, takes
from ...wire import json_response
from ..files import owner_of, page_response
from .schema import DeletedReply, InputTokens, ItemList, ResponseBody, ResponseReply
from .serve import Responses

router = APIRouter(tags=["OpenAI"])


def _responses(request: Request) -> Responses:
    found: Responses = request.app.state.responses
    return found


def _query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Describe a query parameter for the OpenAPI document."""
    return {"name": name, "in": "query", "required": False, "schema": schema}


def _flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return given == "true"


def _integer(request: Request, name: str, default: int, least: int, most: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    if not given.isdecimal() or len(given) > 10 or not least <= int(given) <= most:
        raise InvalidRequest(f"{name} must be from {least} to {most}", param=name)
    return int(given)


@router.post("/v1/responses", responses=replies(ResponseReply, stream=True))
@takes(ResponseBody)
async def create(request: Request) -> Response:
    """Generate a response, with stored conversations, events and background work."""
    _, body = await entered(request, ResponseBody)
    return await _responses(request).serve(request, body)


@router.post("/v1/responses/input_tokens", responses=replies(InputTokens))
@takes(ResponseBody)
async def input_tokens(request: Request) -> Response:
    """Count a conversation's tokens without answering it."""
    _, body = await entered(request, ResponseBody)
    count = await _responses(request).count(body, owner_of(request))
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@router.post("/v1/responses/compact", include_in_schema=False)
@refuses("404: no model that is served was taught to compact a conversation")
async def compact(request: Request) -> Response:
    """Refuse: no served model was trained to compact conversations."""
    raise NotFound("there is no /v1/responses/compact")


@router.get(
    "/v1/responses/{response_id}",
    responses=replies(ResponseReply, stream=True, body=False, bad_query=True),
    openapi_extra={
        "parameters": [
            _query("stream", {"type": "boolean"}),
            _query("starting_after", {"type": "integer", "minimum": 0, "maximum": 2**31}),
        ]
    },
)
async def retrieve(request: Request, response_id: str) -> Response:
    """Return a stored response. One that is still being generated can be streamed."""
    if _flag(request, "stream"):
        after = _integer(request, "starting_after", -1, 0, 2**31)
        return await _responses(request).watch(response_id, owner_of(request), after)
    stored = await _responses(request).find(response_id, owner_of(request))
    return json_response(stored.response)


@router.get(
    "/v1/responses/{response_id}/input_items",
    responses=replies(ItemList, body=False, bad_query=True),
    openapi_extra={
        "parameters": [
            _query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
            _query("order", {"enum": ["asc", "desc"]}),
            _query("after", {"type": "string"}),
        ]
    },
)
async def input_items(request: Request, response_id: str) -> Response:
    """List the input items of a stored response's turn, latest first."""
    limit = _integer(request, "limit", 20, 1, 100)
    order, after = request.query_params.get("order", "desc"), request.query_params.get("after")
    one_of(order, ("asc", "desc"), "order")
    items = (await _responses(request).find(response_id, owner_of(request))).input
    items = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(items) if item.get("id") == after), None)
        if place is None:
            raise InvalidRequest(f"there is no item {after[:128]!r}", param="after")
        items = items[place + 1 :]
    return page_response(items[:limit], more=len(items) > limit)


@router.post("/v1/responses/{response_id}/cancel", responses=replies(ResponseReply))
async def cancel(request: Request, response_id: str) -> Response:
    """Cancel a background response."""
    return json_response(await _responses(request).cancel(response_id, owner_of(request)))


@router.delete("/v1/responses/{response_id}", responses=replies(DeletedReply, body=False))
async def delete(request: Request, response_id: str) -> Response:
    """Delete a stored response."""
    if not await _responses(request).store.delete(response_id, owner_of(request)):
        raise NotFound(f"there is no response {response_id[:128]!r}", param="response_id")
    return json_response({"id": response_id, "object": "response", "deleted": True})

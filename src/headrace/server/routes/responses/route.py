from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ....base.errors import NotFound
from ...entry import entered
from ...openapi import replies, takes
from ...wire import json_response
from .schema import DeletedReply, ItemList, ResponseBody, ResponseReply
from .serve import Responses

router = APIRouter(tags=["OpenAI"])


def _responses(request: Request) -> Responses:
    found: Responses = request.app.state.responses
    return found


def _owner(request: Request) -> str:
    owner: str = request.scope.get("headrace.owner", "")
    return owner


@router.post("/v1/responses", responses=replies(ResponseReply, stream=True))
@takes(ResponseBody)
async def create(request: Request) -> Response:
    """Answer, with stored conversations, events and background work."""
    _, body = await entered(request, ResponseBody)
    return await _responses(request).serve(request, body)


@router.get("/v1/responses/{response_id}", responses=replies(ResponseReply, body=False))
async def retrieve(request: Request, response_id: str) -> Response:
    """A stored response, also one that is still being made."""
    stored = await _responses(request).find(response_id, _owner(request))
    return json_response(stored.response)


@router.get("/v1/responses/{response_id}/input_items", responses=replies(ItemList, body=False))
async def input_items(request: Request, response_id: str) -> Response:
    """What was asked in the turn of a stored response."""
    items = (await _responses(request).find(response_id, _owner(request))).input
    return json_response(
        {
            "object": "list",
            "data": items,
            "first_id": items[0].get("id") if items else None,
            "last_id": items[-1].get("id") if items else None,
            "has_more": False,
        }
    )


@router.post("/v1/responses/{response_id}/cancel", responses=replies(ResponseReply))
async def cancel(request: Request, response_id: str) -> Response:
    """Stop a response that is made in the background."""
    return json_response(await _responses(request).cancel(response_id, _owner(request)))


@router.delete("/v1/responses/{response_id}", responses=replies(DeletedReply, body=False))
async def delete(request: Request, response_id: str) -> Response:
    """Forget a stored response."""
    if not await _responses(request).store.delete(response_id, _owner(request)):
        raise NotFound(f"there is no response {response_id[:128]!r}", param="response_id")
    return json_response({"id": response_id, "object": "response", "deleted": True})

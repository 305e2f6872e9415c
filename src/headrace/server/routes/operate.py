"""Operator's routes: requests in work, usage by key, abort, drain."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ...base.errors import InvalidRequest, NotFound
from ..body import read_model
from ..fields import Body, TokenId
from ..openapi import replies, takes
from ..pins import FIELDS, Pin
from ..service import of
from ..wire import json_response

router = APIRouter(tags=["operator"])


class PinBody(Body):
    name: str = Field(
        pattern=r"^[\w.-]{1,64}$", description="Name of the pin; an existing one is replaced."
    )
    key: str = Field("", description="API key name whose callers can use it; empty: no keys.")
    prompt: str | list[TokenId] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class AbortBody(Body):
    request_id: str = Field(description="Id in the answer (chatcmpl-…, cmpl-…-0).")


@router.get("/operate/usage")
async def usage(request: Request) -> Response:
    """Return the ledger: each key's usage and limits."""
    accounts = request.app.state.accounts
    keys = [
        {
            "name": account.key.name,
            "role": account.key.role,
            "in_work": account.in_work,
            "limits": {
                "requests_per_minute": account.key.requests_per_minute,
                "tokens_per_minute": account.key.tokens_per_minute,
                "concurrent": account.key.concurrent,
            },
            **asdict(account.totals),
        }
        for account in accounts or ()
    ]
    return json_response({"keys": keys})


@router.get("/operate/state")
async def state(request: Request) -> Response:
    """Return the current state of the engine and the server."""
    service = of(request)
    ready, alive, reason, _ = service.health()
    stats = getattr(service.served, "stats", None) if service.loaded else None
    return json_response(
        {
            "ready": ready,
            "alive": alive,
            "reason": reason,
            "draining": service.draining,
            "in_work": service.in_work,
            "step": None if stats is None else asdict(stats),
        }
    )


@router.post("/operate/abort", responses=replies(dict[str, str]))
@takes(AbortBody)
async def abort(request: Request) -> Response:
    """Abort one request; its client gets an error."""
    service = of(request)
    body = await read_model(request, AbortBody, service.options.max_body)
    if not service.abort(body.request_id):
        raise NotFound(f"no request {body.request_id[:128]!r} is in work", param="request_id")
    return json_response({"aborted": body.request_id})


@router.get("/operate/pins")
async def pins(request: Request) -> Response:
    """List the prompts pinned in the context cache."""
    return json_response({"pins": [_shown(pin) for pin in request.app.state.pins]})


@router.post("/operate/pins", responses=replies(dict[str, Any]))
@takes(PinBody)
async def pin(request: Request) -> Response:
    """Pin a prompt: compute or load it, and keep it in the context cache."""
    body = await read_model(request, PinBody, of(request).options.max_body)
    wanted = body.model_dump(include=FIELDS, exclude_none=True)
    if ("prompt" in wanted) == ("messages" in wanted):
        raise InvalidRequest("give prompt or messages, one of them", param="prompt")
    one = Pin(body.name, body.key, wanted)
    answer = await request.app.state.pins.add(one)
    if answer.status != 200:
        return Response(answer.body, answer.status, media_type="application/json")
    return json_response(_shown(one))


@router.delete("/operate/pins/{name}", responses=replies(dict[str, str], body=False))
async def unpin(request: Request, name: str) -> Response:
    """Unpin a prompt."""
    if not request.app.state.pins.remove(name):
        raise NotFound(f"no prompt {name[:128]!r} is pinned", param="name")
    return json_response({"unpinned": name})


@router.post("/operate/drain")
async def drain(request: Request) -> Response:
    """Refuse new work and report not ready; requests in work are finished. A signal ends the
    process."""
    service = of(request)
    service.draining = True
    return json_response({"draining": True, "in_work": service.in_work})


def _shown(pin: Pin) -> dict[str, Any]:
    shown = asdict(pin)
    del shown["request"]
    return shown

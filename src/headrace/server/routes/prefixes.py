"""`/v1/prefixes/stream`: what a router wants to know of this server, as it changes."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...base.errors import NotFound, Overloaded
from ...base.text_prefixes import PATH_TOLD
from ...engine.held import MOST_FOLLOWERS, HeldPrefixes
from ..connection import EventStream
from ..openapi import raw
from ..service import Service, of
from ..wire import named_frame

router = APIRouter(tags=["operation"])

MOST_KEYS = 4096
"""Keys of one event: a millisecond of the reader's loop."""
LOOK_SECONDS = 0.25
"""How often the requests in work are looked at."""


@router.get(PATH_TOLD, responses=raw("text/event-stream", also=(404, 503)))
async def prefixes_stream(request: Request) -> Response:
    """Events `prefixes`: `held` and `gone`, names of beginnings of prompts (`base.text_prefixes`)
    that the prefix cache holds and no longer holds, and `in_work`, the requests in work. First all
    that are held, in one event or several, then what changes."""
    service = of(request)
    held: HeldPrefixes | None = getattr(service.engine, "held_prefixes", None)
    if held is None:
        raise NotFound("this server has no prefix cache", code="no_prefix_cache")
    return EventStream(_events(service, held), keep_alive=service.keep_alive)


async def _events(service: Service, held: HeldPrefixes) -> AsyncIterator[bytes]:
    follower = held.follow()
    if follower is None:
        raise Overloaded(f"{MOST_FOLLOWERS} routers are served already", retry_after=30.0)
    said = -1
    try:
        while not service.draining:
            news, in_work = follower.take(MOST_KEYS), service.in_work
            if news or in_work != said:
                said = in_work
                yield named_frame(
                    "prefixes",
                    {
                        "held": [key for key, there in news.items() if there],
                        "gone": [key for key, there in news.items() if not there],
                        "in_work": in_work,
                    },
                )
            await follower.wait(LOOK_SECONDS)
    finally:
        held.leave(follower)

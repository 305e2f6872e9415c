"""Route `/v1/prefixes/stream`: this server's cached prefixes and load, for routers."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...base.errors import NotFound, Overloaded
from ...base.text_prefixes import PATH_TOLD
from ...engine.clients.held import MOST_FOLLOWERS, HeldPrefixes
from ..connection import EventStream
from ..openapi import raw
from ..service import Service, of
from ..wire import named_frame

router = APIRouter(tags=["operation"])

MOST_KEYS = 4096
"""Keys of one event: they take a millisecond of the reader's event loop."""
LOOK_SECONDS = 0.25
"""Seconds between two checks of the number of requests in work."""


@router.get(PATH_TOLD, responses=raw("text/event-stream", also=(404, 503)))
async def prefixes_stream(request: Request) -> Response:
    """Stream events `prefixes` with the cached prefixes and the load. `held` and `gone` are prefix
    hashes of prompts (`base.text_prefixes`) that the cache now holds and no longer holds. `in_work`
    is the number of requests in work. First come all held ones, in one event or several, then the
    changes."""
    service = of(request)
    held: HeldPrefixes | None = getattr(service.engine, "held_prefixes", None)
    if held is None:
        raise NotFound("this server has no prefix cache", code="no_prefix_cache")
    return EventStream(_events(service, held), keep_alive=service.keep_alive)


async def _events(service: Service, held: HeldPrefixes) -> AsyncIterator[bytes]:
    follower = held.follow()
    if follower is None:
        raise Overloaded(f"{MOST_FOLLOWERS} routers are served already", retry_after=30.0)
    reported = -1
    try:
        while not service.draining:
            news, in_work = follower.take(MOST_KEYS), service.in_work
            if news or in_work != reported:
                reported = in_work
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

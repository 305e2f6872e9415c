"""Routes `/v1/stats` and `/v1/stats/stream`: data for the live page and `headrace top`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...connection import EventStream
from ...openapi import raw, replies
from ...service import of
from ...wire import json_response
from .schema import StatsReply
from .serve import watchers

router = APIRouter(tags=["operation"])


@router.get("/v1/stats", responses=replies(StatsReply, body=False))
async def stats(request: Request) -> Response:
    """Return the last two minutes, one point a second, and the requests in work."""
    return json_response(watchers(request.app).snapshot())


@router.get("/v1/stats/stream", responses=raw("text/event-stream", also=(503,)))
async def stats_stream(request: Request) -> Response:
    """Stream events: a `snapshot` at once (as `/v1/stats`), then a `point` each second."""
    frames = watchers(request.app).events()
    return EventStream(frames, keep_alive=of(request).keep_alive)

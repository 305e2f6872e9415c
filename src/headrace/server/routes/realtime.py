"""`/v1/realtime`: a session over a websocket, in which speech is transcribed while it goes on."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ...base.errors import InvalidRequest
from ..service import of

router = APIRouter(tags=["OpenAI"], include_in_schema=False)


class UpgradeNeeded(InvalidRequest):
    status = 426
    code = "upgrade_required"


@router.get("/v1/realtime")
async def realtime(request: Request) -> Response:
    """Open a transcription session."""
    service = of(request)
    ears = service.ears
    if "headrace.socket" not in request.scope:
        raise UpgradeNeeded(
            "a session needs a websocket; where the client asked for one, the server lacks the "
            "package websockets (pip install 'headrace[audio]')"
        )
    return ears.live(request)

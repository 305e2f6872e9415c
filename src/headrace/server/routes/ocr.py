"""Routes `/v1/ocr`, text in a picture, and `/v1/cameras`, programs on frames over a websocket."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ..entry import entered
from ..openapi import replies, takes
from ..program_fields import OcrBody
from ..service import of
from ..session import check_socket
from ..wire import json_response

router = APIRouter(tags=["programs"])


class OcrLine(TypedDict):
    text: str
    score: float
    """Mean confidence of its characters."""
    box: list[list[float]]
    """Corners (x, y), clockwise from the upper left one, in pixels of the upright picture."""


class OcrReply(TypedDict):
    object: Literal["ocr"]
    model: str
    width: int
    """Pixels of the upright picture."""
    height: int
    text: str
    """The lines' texts, one below the other."""
    lines: list[OcrLine]


@router.post("/v1/ocr", responses=replies(OcrReply))
@takes(OcrBody)
async def ocr(request: Request) -> Response:
    """Read the lines of text in a picture."""
    service, body = await entered(request, OcrBody)
    return json_response(await service.routes_of_programs.read(request, body))


@router.get("/v1/cameras", include_in_schema=False)
async def cameras(request: Request) -> Response:
    """Open a session of cameras."""
    routes = of(request).routes_of_programs
    check_socket(request)
    return routes.cameras(request)

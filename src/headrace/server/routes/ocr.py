"""Route `/v1/ocr`: text in a picture."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ..entry import entered
from ..fields import Body
from ..openapi import replies, takes
from ..wire import json_response

router = APIRouter(tags=["programs"])


class OcrBody(Body):
    model: str | None = Field(
        None, description="Name of a pipeline, such as ocr-pp-v4; null: the only one."
    )
    image: str = Field(
        min_length=1,
        description="A jpeg, png, webp, bmp or gif as a data URL or in base64; nothing is fetched.",
    )
    timeout: float | None = Field(
        None, gt=0, le=3600, description="Seconds to the deadline of the whole request."
    )
    urgency: Literal["interactive", "batch"] | None = Field(
        None, alias="class", description="Default interactive; batch comes last."
    )


class OcrLine(TypedDict):
    text: str
    score: float
    """Mean odds of its characters."""
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

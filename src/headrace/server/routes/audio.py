"""`/v1/audio/transcriptions` and `/v1/audio/translations`: what is said in a file of sound."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..openapi import replies, takes_form
from ..service import of
from ..transcription_form import FORM, TranscriptionReply

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/audio/transcriptions", responses=replies(TranscriptionReply, stream=True))
@takes_form(FORM)
async def transcriptions(request: Request) -> Response:
    """The text of a sound, in its own language."""
    return await of(request).ears.transcribe(request, "transcribe")


@router.post("/v1/audio/translations", responses=replies(TranscriptionReply, stream=True))
@takes_form(FORM)
async def translations(request: Request) -> Response:
    """The text of a sound, in English."""
    return await of(request).ears.transcribe(request, "translate")

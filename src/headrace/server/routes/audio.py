"""`/v1/audio`: what is said in a file of sound, and the sound of a text."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..entry import entered
from ..openapi import ERRORS, raw, replies, takes, takes_form
from ..service import of
from ..speech_fields import SpeechBody
from ..transcription_form import FORM, TranscriptionReply

router = APIRouter(tags=["OpenAI"])
_KINDS = "audio/mpeg", "audio/ogg", "audio/flac", "audio/wav", "audio/pcm", "text/event-stream"
SOUND = raw(*_KINDS, also=tuple(ERRORS))


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


@router.post("/v1/audio/speech", responses=SOUND)
@takes(SpeechBody)
async def speech(request: Request) -> Response:
    """The sound of a text, while it is made."""
    service, body = await entered(request, SpeechBody)
    return await service.voices.speak(request, body)

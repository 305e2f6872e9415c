"""Routes `/v1/audio` (transcription and speech synthesis) and `/v1/realtime` (live transcription
over a websocket)."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ..entry import chosen, entered, hearing
from ..openapi import ERRORS, raw, replies, takes, takes_form
from ..service import of
from ..session import check_socket
from ..speech_fields import SpeechBody
from ..transcription_form import FORM, TranscriptionReply

router = APIRouter(tags=["OpenAI"])
_KINDS = "audio/mpeg", "audio/ogg", "audio/flac", "audio/wav", "audio/pcm", "text/event-stream"
SOUND = raw(*_KINDS, also=tuple(ERRORS))


@router.post("/v1/audio/transcriptions", responses=replies(TranscriptionReply, stream=True))
@takes_form(FORM)
async def transcriptions(request: Request) -> Response:
    """Transcribe a sound file in its own language."""
    return await hearing(of(request)).ears.transcribe(request, "transcribe")


@router.post("/v1/audio/translations", responses=replies(TranscriptionReply, stream=True))
@takes_form(FORM)
async def translations(request: Request) -> Response:
    """Translate the speech of a sound file into English text."""
    return await hearing(of(request)).ears.transcribe(request, "translate")


@router.post("/v1/audio/speech", responses=SOUND)
@takes(SpeechBody)
async def speech(request: Request) -> Response:
    """Synthesise speech from a text and send it while it is generated."""
    service, body = await entered(request, SpeechBody)
    return await service.voices.speak(request, body)


@router.get("/v1/realtime", include_in_schema=False)
async def realtime(request: Request) -> Response:
    """Open a transcription session."""
    service = of(request)
    name = request.query_params.get("model") or hearing(service).name
    ears = (await chosen(service, name)).ears
    check_socket(request)
    return ears.live(request)

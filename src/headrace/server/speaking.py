"""Route `/v1/audio/speech`: speech synthesis, as a file sent while it is generated, or as
events."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..base.errors import HeadraceError
from ..engine.clients.face import ServingEngine
from ..engine.clients.speaking import Speaker, Speaking
from ..media.writing import MEDIA_TYPES, SoundWriter
from .caller import CALLER, engine_id
from .connection import EventStream, while_connected
from .errors import error_response
from .generation import Usage
from .speech_fields import SpeechBody
from .wire import frame

if TYPE_CHECKING:
    from .service import Service


class SpeakingRoutes:
    """Speech synthesis route; imported only if a model synthesises speech."""

    def __init__(self, service: Service, engine: ServingEngine) -> None:
        """Prepare the synthesis. Raises as `Speaker.of` does."""
        self._service, self._speaker = service, Speaker.of(engine)

    async def speak(self, request: Request, body: SpeechBody) -> Response:
        """Answer one request. Raises as `Speaker.speak` does, and `PackageAbsent`."""
        self._service.check_model(body.model)
        format = body.response_format or "mp3"
        writer = SoundWriter(format, self._speaker.rate)
        speaking = self._speaker.speak(
            body.input,
            body.voice,
            body.given(),
            request_id=engine_id(request.scope.get("headrace.request_id", "speech")),
            priority=body.priority or 0,
            cache_salt=CALLER.get().salt(None),
        )
        model = self._service.name
        if body.stream_format == "sse":
            events = _events(speaking, writer, request.scope, model)
            return EventStream(events, keep_alive=self._service.keep_alive)
        return SoundReply(_file(speaking, writer, request.scope, model), MEDIA_TYPES[format])


async def _file(
    speaking: Speaking, writer: SoundWriter, scope: Scope, model: str
) -> AsyncGenerator[bytes]:
    """Yield the bytes of the file, none of them empty."""
    try:
        async for samples in speaking.pieces():
            if data := writer.write(samples):
                yield data
        if data := writer.end():
            yield data
    finally:
        scope["headrace.usage"] = _used(speaking, model)
        speaking.cancel()


async def _events(
    speaking: Speaking, writer: SoundWriter, scope: Scope, model: str
) -> AsyncGenerator[bytes]:
    file = _file(speaking, writer, scope, model)
    try:
        async for data in file:
            audio = base64.b64encode(data).decode()
            yield frame({"type": "speech.audio.delta", "audio": audio})
    finally:
        await file.aclose()
    given, made = speaking.prompt_tokens, speaking.tokens
    yield frame(
        {
            "type": "speech.audio.done",
            "finish_reason": speaking.finish_reason,
            "usage": {"input_tokens": given, "output_tokens": made, "total_tokens": given + made},
        }
    )


def _used(speaking: Speaking, model: str) -> Usage:
    """Return the usage that a key is charged: tokens, as for a text."""
    found = Usage(model)
    found.known_prompt(0, speaking.prompt_tokens)
    found.completion = speaking.tokens
    return found


class SoundReply(Response):
    """Response of bytes as they are generated.

    An error before the first byte is answered with its status. A later one ends the connection, so
    that no client takes the part for the whole.
    """

    def __init__(self, data: AsyncGenerator[bytes], media_type: str) -> None:
        super().__init__(media_type=media_type, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._data = data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async for data in self._data:
                if not begun:
                    start = {"type": "http.response.start", "status": 200}
                    await send({**start, "headers": self.raw_headers})
                    begun = True
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except HeadraceError as error:
            if not begun:
                await error_response(error)(scope, receive, send)
        finally:
            await asyncio.shield(self._data.aclose())

"""Route `/v1/audio/speech`: speech synthesis, as a file sent while it is generated, or as
events."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..base.errors import HeadraceError, InvalidRequest, ModelNotFound
from ..base.names import nearest
from ..engine.clients.codec_speaking import CodecSpeaker
from ..engine.clients.speaking import Speaker, Speaking, SpeechClient
from ..engine.programs.speaking import ProgramSpeaker
from ..media.writing import MEDIA_TYPES, SoundWriter
from .caller import CALLER, RECEIVE, engine_id
from .connection import EventStream, while_connected
from .errors import error_response
from .generation import Usage
from .speech_fields import SpeechBody
from .wire import frame

if TYPE_CHECKING:
    from ..engine.clients.face import ServingEngine
    from ..engine.programs.engine import ProgramEngine
    from .service import Service


class SpeakingRoutes:
    """Speech synthesis route; imported only if something speaks."""

    def __init__(
        self, service: Service, own: Speaker | None, others: Mapping[str, Speaker]
    ) -> None:
        """Serve speakers. `own`: the model's; `others`: those of programs, by name."""
        self._service, self._own, self._others = service, own, others

    @classmethod
    def of(
        cls, service: Service, engine: ServingEngine | None, programs: ProgramEngine | None
    ) -> SpeakingRoutes:
        """Open the voices of a model, if it has any, and of programs. Raises as `CodecSpeaker.of`
        does."""
        own = None if engine is None else CodecSpeaker.of(engine)
        return cls(service, own, {} if programs is None else program_speakers(service, programs))

    def find(self, name: str | None) -> tuple[str, Speaker]:
        """Return a speaker and its name; without a name the model's own, or else the only one.
        Raises `ModelNotFound`, `InvalidRequest`."""
        if name and name in self._others:
            return name, self._others[name]
        if self._own is not None:
            self._service.check_model(name)
            return self._service.name, self._own
        if not name and len(self._others) == 1:
            return next(iter(self._others.items()))
        there = ", ".join(self._others)
        if not name:
            raise InvalidRequest(f"name one of: {there}", param="model")
        raise ModelNotFound(
            f"nothing named {name!r:.200} speaks here{nearest(name, self._others)}; this server "
            f"has {there}",
            param="model",
        )

    async def speak(self, request: Request, body: SpeechBody) -> Response:
        """Answer one request. Raises as `Speaker.speak` does, and `PackageAbsent`."""
        name, speaker = self.find(body.model)
        format = body.response_format or "mp3"
        writer = SoundWriter(format, speaker.rate)
        caller = CALLER.get()
        client = SpeechClient(
            caller.owner,
            engine_id(request.scope.get("headrace.request_id", "speech")),
            caller.salt(None),
        )
        speaking = speaker.speak(body.input, body.voice, body.given(), client)
        if body.stream_format == "sse":
            events = _events(speaking, writer, request.scope, name)
            return EventStream(events, keep_alive=self._service.keep_alive)
        return SoundReply(_file(speaking, writer, request.scope, name), MEDIA_TYPES[format])


def program_speakers(service: Service, engine: ProgramEngine) -> dict[str, Speaker]:
    """Return the speakers of the programs that have voices, by name."""

    async def in_thread(work: Callable[..., str], *arguments: str) -> str:
        RECEIVE.set(None)  # The reply watches the connection during all steps.
        return await service.decoders.run(work, *arguments)

    return {
        name: ProgramSpeaker(engine, program, in_thread)
        for name, program in engine.programs.items()
        if program.voice is not None
    }


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

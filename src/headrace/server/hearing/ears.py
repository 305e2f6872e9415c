"""Implementation of the transcription routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ...base.errors import EngineFault, InvalidRequest
from ...engine.hearing.engine import Hearing, HearingEngine
from ...engine.hearing.records import HeardSegment, HearOptions, SoundEnd
from ...media import RATE, REFUSALS, AudioLimits, declared, decode_into
from ...speech.languages import code_of
from ...speech.pauses import USUAL_PAUSES, Pauses
from ..caller import CALLER, engine_id
from ..connection import EventStream, while_connected
from ..entry import chosen
from ..wire import frame
from . import answers
from .form import AudioForm, VadFields, read_form
from .handshake import Live

if TYPE_CHECKING:
    from ..service import Service

LIMITS = AudioLimits()
LONG_SECONDS, LONG_BYTES = 600.0, 1 << 18
"""Length in seconds from which decoding a sound takes seconds; size, if its header gives no
length."""


class HearingRoutes:
    """Transcription service of one server."""

    def __init__(self, service: Service, engine: HearingEngine) -> None:
        self.service = service
        self.engine = engine

    async def transcribe(self, request: Request, task: str) -> Response:
        """Answer a form with a sound file, whole or as a stream."""
        self.service.check_open(request.scope)
        if self.service.models == [self.service]:
            self.engine.check_open()
        data, form = await read_form(request, LIMITS.bytes)
        ears = (await chosen(self.service, form.model or self.service.name)).ears
        assert isinstance(ears, HearingRoutes)
        return await ears._answer(request, task, data, form)

    async def _answer(
        self, request: Request, task: str, data: bytearray, form: AudioForm
    ) -> Response:
        self.service.check_model(form.model)
        self.engine.check_open()
        options = options_of(form, task)
        self.engine.check(options)
        self.service.enter(request.scope)
        name = engine_id(request.scope.get("headrace.request_id", "audio"))
        if form.stream:
            events = self._events(data, form, options, request.scope, name)
            return EventStream(events, keep_alive=self.service.keep_alive)
        work = self._whole(data, options, name)
        pieces, end = await while_connected(request.receive, work)
        request.scope["headrace.usage"] = answers.used(end.seconds, pieces, self.service.name)
        return answers.answer(form, task, pieces, end)

    def live(self, request: Request) -> Response:
        """Answer the handshake of a session."""
        return Live(self.service, self.engine, request)

    async def _whole(
        self, data: bytearray, options: HearOptions, name: str
    ) -> tuple[list[HeardSegment], SoundEnd]:
        hearing = await self._hearing(data, options, name)
        try:
            return await heard(hearing)
        finally:
            hearing.cancel()

    async def _events(
        self, data: bytearray, form: AudioForm, options: HearOptions, scope: Scope, name: str
    ) -> AsyncIterator[bytes]:
        hearing = await self._hearing(data, options, name)
        pieces: list[HeardSegment] = []
        try:
            async for news in hearing:
                if news.pieces:
                    yield frame(answers.delta(form, news.pieces, len(pieces)))
                pieces += news.pieces
                if news.end is not None:
                    used = answers.used(news.end.seconds, pieces, self.service.name)
                    scope["headrace.usage"] = used
                    yield frame(answers.done(form, options.task, pieces, news.end))
        finally:
            hearing.cancel()

    async def _hearing(self, data: bytearray, options: HearOptions, name: str) -> Hearing:
        """Decode a sound file and begin its transcription.

        The length declared in its header is charged first, and is the most that is decoded.
        """
        seconds, limits = declared(data), LIMITS
        if seconds is not None:
            if seconds > LIMITS.seconds:
                raise InvalidRequest(REFUSALS["long"], param="file")
            limits = replace(LIMITS, seconds=min(seconds + 1.0, LIMITS.seconds))
        count = round((seconds or 0.0) * RATE)
        long = seconds > LONG_SECONDS if seconds is not None else len(data) > LONG_BYTES
        payload = self.engine.payload(CALLER.get().owner, count)
        try:
            decoders = self.service.decoders
            found = await decoders.run(decode_into, data, payload.file, limits, long=long)
        except BaseException:
            self.engine.drop(payload)
            raise
        return self.engine.hear(payload, found.count, options, name)


async def heard(hearing: Hearing) -> tuple[list[HeardSegment], SoundEnd]:
    """Collect all segments of a sound. Raises the error that ended it."""
    pieces: list[HeardSegment] = []
    async for news in hearing:
        pieces += news.pieces
        if news.end is not None:
            return pieces, news.end
    raise EngineFault("the sound ended without its text")


def options_of(form: AudioForm, task: str) -> HearOptions:
    pauses: Pauses | None = None
    if isinstance(form.chunking_strategy, VadFields):
        given = form.chunking_strategy
        pauses = Pauses(
            given.threshold, given.prefix_padding_ms / 1000, given.silence_duration_ms / 1000
        )
    elif form.chunking_strategy == "auto":
        pauses = USUAL_PAUSES
    return HearOptions(
        language=code_of(form.language) if form.language else None,
        task=task,
        prompt=form.prompt,
        temperature=form.temperature,
        words="word" in form.timestamp_granularities,
        logprobs=bool(form.include),
        pauses=pauses,
    )

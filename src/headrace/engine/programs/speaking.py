"""Speech synthesis by a foreign program: a job with one run per sentence.

The sound of a sentence is sent while the next one is made. Each run has its own random draws from
the request's seed, so a sound is the same streamed or not. A job whose client reads slowly gives
its turn to others, and holds two sentences.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from ...base.errors import EngineFault, InvalidRequest, UnsupportedModel
from ...kernels.draws import streams
from ...programs.rows import Array
from ...sched.deadlines import CLASSES
from ...speech.program_voices import ProgramVoice
from ...speech.sentences import cut, pieces
from ...speech.voices import check_voice
from ..clients.speaking import Floats, Speaking, SpeechClient, check_text, taken
from .engine import ProgramEngine
from .executor import ServedProgram
from .jobs import ProgramJob

FIELDS = "seed", "speed", "phonemes", "timeout", "class"
LEAST_SPEED, MOST_SPEED = 0.25, 4.0
"""Bounds of `speed`, as in OpenAI's API."""
MOST_SECONDS = 3600.0
TOKENS = 50
"""Tokens counted for a second of sound, as in transcription."""
AHEAD = 2
"""Most runs whose sound the client has not taken."""
Beside = Callable[..., Awaitable[str]]
"""Runs a function with its arguments off the event loop. If its caller leaves it ends the process
that the function reported by `on_child`."""


class ProgramSpeaker:
    """One program that speaks."""

    def __init__(self, engine: ProgramEngine, program: ServedProgram, beside: Beside) -> None:
        """Raises `UnsupportedModel` for a program without voices."""
        if program.voice is None:
            raise UnsupportedModel(f"{program.name} does not speak")
        self.engine, self.program, self.beside = engine, program, beside
        self.voice: ProgramVoice = program.voice
        self.metrics = engine.spoken.of(program.name)

    @property
    def rate(self) -> int:
        return self.voice.rate

    @property
    def voices(self) -> tuple[str, ...]:
        return self.voice.names

    def speak(
        self, text: str, voice: str, given: Mapping[str, Any], client: SpeechClient
    ) -> ProgramSpeaking:
        """Begin to speak a text, or phonemes. Raises as `Speaker.speak`."""
        check_text(text)
        check_voice(voice, self.voices)
        fields = taken(given, FIELDS, self.program.name)
        _bounded("speed", fields.setdefault("speed", 1.0), LEAST_SPEED, MOST_SPEED)
        if "timeout" in fields:
            _bounded("timeout", fields["timeout"], 1e-3, MOST_SECONDS)
        if fields.setdefault("class", "interactive") not in ("interactive", "batch"):
            raise InvalidRequest("class must be interactive or batch", param="class")
        seed = fields.setdefault("seed", secrets.randbits(63))
        if not -(2**63) <= seed < 2**64:
            raise InvalidRequest("seed must be from -2^63 to 2^64 - 1", param="seed")
        if fields.setdefault("phonemes", False):
            if unknown := self.voice.unknown(text):
                raise InvalidRequest(
                    f"{unknown!r} is no phoneme of {self.program.name}", param="input"
                )
            parts = [text.strip()]
        else:
            self.voice.spoken(voice)
            self.voice.check(text)
            parts = pieces(text)
        return ProgramSpeaking(self, parts, voice, fields, client)


def _bounded(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN fails every comparison.
        raise InvalidRequest(f"{name} must be from {least:g} to {most:g}", param=name)


class ProgramSpeaking(Speaking):
    """One text on its way through a program."""

    def __init__(
        self,
        speaker: ProgramSpeaker,
        parts: list[str],
        voice: str,
        fields: Mapping[str, Any],
        client: SpeechClient,
    ) -> None:
        super().__init__(speaker.metrics, speaker.rate)
        self._speaker, self._parts, self._voice = speaker, parts, voice
        self._fields, self._client = fields, client
        self._ready: asyncio.Queue[Floats | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(AHEAD)
        self._runs = 0
        self._work: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

    async def made(self) -> AsyncGenerator[Floats]:
        """Yield the sound of each sentence. Raises the errors of a job, those of phonemes, and
        `InvalidRequest` if the text has nothing that is spoken."""
        work = asyncio.ensure_future(self._speak())
        work.add_done_callback(lambda _: self._ready.put_nowait(None))
        self._work = work
        try:
            while (samples := await self._ready.get()) is not None:
                self.tokens = math.ceil(TOKENS * (self.samples + len(samples)) / self._rate)
                yield samples
                self._room.release()
            await work
        finally:
            work.cancel()
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()  # It was raised already, or the reader has left.

    async def _speak(self) -> None:
        """Make all of the sound, in a job."""
        speaker, first = self._speaker, list[str]()

        async def prepare() -> None:
            first.extend(await self._symbols(self._parts[0]) if self._parts else [])

        begun = speaker.engine.jobs.begun(
            speaker.program.name,
            urgency=CLASSES[self._fields["class"]],
            timeout=self._fields.get("timeout", math.inf),
            owner=self._client.owner,
            prepare=prepare,
        )
        async with begun as job:
            for at, part in enumerate(self._parts):
                for symbols in await self._symbols(part) if at else first:
                    await self._run(job, symbols)
        if not self._runs:
            raise InvalidRequest("input has nothing that can be spoken", param="input")

    async def _symbols(self, part: str) -> list[str]:
        """Return the phonemes of a part of the text, a string for each run."""
        voice, said = self._speaker.voice, part
        # Slow speech is longer, so its run would be, too.
        most = max(1, int(voice.most * min(1.0, self._fields["speed"])))
        if not self._fields["phonemes"]:
            said = await self._speaker.beside(voice.spoken(self._voice), part)
        return [one for one in cut(said, most) if any(c.isalnum() for c in one)]

    async def _run(self, job: ProgramJob, symbols: str) -> None:
        """Make the sound of these phonemes."""
        if self._room.locked():
            async with job.resting():
                await self._room.acquire()
        else:
            await self._room.acquire()
        speaker = self._speaker
        fed = speaker.voice.feed(symbols, self._voice, float(self._fields["speed"]))
        self.prompt_tokens += len(symbols)
        drawn = streams(
            np.array([self._fields["seed"] % 2**64], np.uint64), np.array([self._runs], np.int64)
        )
        try:
            found = await job.run(speaker.program, fed, seed=int(drawn[0]) >> 1)
        except InvalidRequest as error:
            name = speaker.program.name
            raise EngineFault(f"{name} does not run on a text: {error.message}") from error
        samples = _sound(found, speaker.program.name)
        if self._runs and (silence := round(speaker.voice.pause * self._rate)):
            samples = np.concatenate([np.zeros(silence, np.float32), samples])
        self._runs += 1
        self._ready.put_nowait(samples)


def _sound(found: Mapping[str, Array], name: str) -> Floats:
    """Return a run's samples, from -1 to 1. Raises `EngineFault` if it made no sound."""
    samples = np.ravel(next(iter(found.values())))
    if samples.dtype != np.float32 or not samples.size or not np.isfinite(samples).all():
        raise EngineFault(f"{name} has made no sound")
    loudest = max(1.0, float(np.abs(samples).max()))
    return (samples / np.float32(loudest)).astype(np.float32, copy=False)

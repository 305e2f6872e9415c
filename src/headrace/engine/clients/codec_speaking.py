"""Speech synthesis by a language model that writes the codes of a sound, and the codec that decodes
it.

The model's tokens come from the engine like any answer's. Frames of them go to the codec as soon as
they are whole, in a thread of its own. So the first samples are there long before the model's last
token. Frames that arrive while the codec computes are its next piece.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import Counter

from ...base.errors import EngineFault, Overloaded, UnsupportedModel
from ...base.sampling import SamplingParams
from ...kernels.cpu.library import LibraryAbsent, Team
from ...speech.codec import Codec
from ...speech.voices import FrameReader, VoiceFiles, open_voices
from .face import RequestOptions, ServingEngine
from .speaking import Floats, Speaking, SpeakingMetrics, SpeechClient, check_text, taken

FIELDS = "seed", "temperature", "top_p", "repetition_penalty", "max_tokens"
PIECE = 2
"""Frames that the codec takes at a time: other sounds get their turn, and its rows stay in the
processor's cache."""


def open_speech_codec(voices: VoiceFiles, threads: int = 1) -> Codec:
    """Open the codec. Raises `ModelFileError`, and `UnsupportedModel` without the CPU kernels."""
    try:
        team = Team(threads)
    except LibraryAbsent as absent:
        raise UnsupportedModel(f"the codec runs on the CPU kernels: {absent}") from absent
    return Codec(voices.codec, team)


class CodecSpeaker:
    """One speech-synthesis model, for the event loop of its engine."""

    def __init__(self, engine: ServingEngine, voices: VoiceFiles, threads: int = 1) -> None:
        """Raises `ModelFileError` for a bad codec, `UnsupportedModel` without the CPU kernels."""
        self.engine, self.files = engine, voices
        self._codec = open_speech_codec(voices, threads)
        # One thread: the sounds take turns, piece by piece.
        self._thread = ThreadPoolExecutor(1, "headrace-codec")
        self.metrics = SpeakingMetrics(engine.registry).of(engine.model_name)
        self.dropped = Counter(
            "headrace_speech_tokens_dropped",
            "Tokens that were no code of their place.",
            ["model_name"],
            registry=engine.registry,
        ).labels(engine.model_name)

    @classmethod
    def of(cls, engine: ServingEngine) -> CodecSpeaker:
        """Open the speaker of a model's folder. Raises what `open_voices` and the class raise."""
        return cls(engine, open_voices(engine.files.path, engine.files.arch.vocab_size))

    @property
    def rate(self) -> int:
        return self.files.codec.rate

    @property
    def voices(self) -> tuple[str, ...]:
        return self.files.voices

    def speak(
        self, text: str, voice: str, given: Mapping[str, Any], client: SpeechClient
    ) -> CodecSpeaking:
        """Begin to speak a text. `given`: fields of `SamplingParams`, which override the folder's,
        and `priority`.

        Raises, before any work, what `ServingEngine.submit` raises, and `InvalidRequest` for an
        empty or too long text and for an unknown voice.
        """
        check_text(text)
        fields = taken(given, (*FIELDS, "priority"), self.engine.model_name)
        # Text that looks like a special token is text.
        encode: Callable[[str], list[int]] = partial(self.engine.tokenizer.encode, special=False)
        prompt = self.files.ids(encode, voice, text)
        options: RequestOptions = {
            "request_id": client.request_id,
            "priority": fields.pop("priority", 0),
            "cache_salt": client.cache_salt,
        }
        sampling = SamplingParams(**{"max_tokens": None, **self.files.sampling, **fields})
        sampling.verify(self.engine.files.arch.vocab_size)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        sampling.stop_token_ids = [self.files.end]
        return CodecSpeaking(self, prompt, sampling, options)

    async def run(self, work: Callable[[], Floats]) -> Floats:
        """Run `work` in the codec's thread; return its samples."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def begin(self, seed: int) -> Any:
        """Begin a new sound of the codec."""
        return self._codec.stream(seed % 2**64)


class CodecSpeaking(Speaking):
    """One text on its way through a language model and its codec."""

    def __init__(
        self,
        speaker: CodecSpeaker,
        prompt: list[int],
        sampling: SamplingParams,
        options: RequestOptions,
    ) -> None:
        super().__init__(speaker.metrics, speaker.rate)
        self._speaker = speaker
        self._sound = speaker.begin(sampling.seed or 0)
        self._reader = FrameReader(speaker.files)
        self.prompt_tokens = len(prompt)
        self._stream = speaker.engine.submit(prompt, sampling, **options)

    def cancel(self) -> None:
        self._stream.cancel()

    async def made(self) -> AsyncGenerator[Floats]:
        """Yield samples as they are decoded. Raises the error that ended the sound, and
        `EngineFault` if the model wrote no frame at all."""
        try:
            async for delta in self._stream:
                self.tokens += len(delta.token_ids)
                if delta.finish_reason == "abort":
                    raise Overloaded("the server ended this sound before it was complete")
                self.finish_reason = delta.finish_reason or self.finish_reason
                frames = self._reader.take(delta.token_ids)
                for at in range(0, len(frames), PIECE):
                    push = partial(self._sound.push, frames[at : at + PIECE])
                    yield await self._speaker.run(push)
            none = np.zeros((0, len(self._speaker.files.codec.levels)), np.int64)
            samples = await self._speaker.run(partial(self._sound.push, none, last=True))
            if not len(samples) and not self.samples:
                raise EngineFault("the model wrote no sound for this text")
            yield samples
        finally:
            self._speaker.dropped.inc(self._reader.dropped)

"""Speech synthesis: a language model that writes the codes of a sound, and the codec that decodes
it.

The model's tokens come from the engine like any answer's. Frames of them go to the codec as soon as
they are whole, in a thread of its own. So the first samples are there long before the model's last
token. Frames that arrive while the codec computes are its next piece.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
from prometheus_client import Counter, Histogram

from ...base.errors import EngineFault, InvalidRequest, Overloaded, UnsupportedModel
from ...base.sampling import SamplingParams
from ...kernels.cpu.library import LibraryAbsent, Team
from ...speech.codec import Codec
from ...speech.voices import FrameReader, VoiceFiles, open_voices
from .face import RequestOptions, ServingEngine

Floats = npt.NDArray[np.float32]
MOST_CHARACTERS = 4_096
"""Longest text that is spoken, as in OpenAI's API."""
PIECE = 2
"""Frames that the codec takes at a time: other sounds get their turn, and its rows stay in the
processor's cache."""
SECONDS = (0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)


def open_speech_codec(voices: VoiceFiles, threads: int = 1) -> Codec:
    """Open the codec. Raises `ModelFileError`, and `UnsupportedModel` without the CPU kernels."""
    try:
        team = Team(threads)
    except LibraryAbsent as absent:
        raise UnsupportedModel(f"the codec runs on the CPU kernels: {absent}") from absent
    return Codec(voices.codec, team)


class SpeakingMetrics:
    """Instruments in addition to those of the text engine."""

    def __init__(self, engine: ServingEngine) -> None:
        def named(kind: Any, name: str, words: str, **more: Any) -> Any:
            made = kind(f"headrace_{name}", words, ["model_name"], registry=engine.registry, **more)
            return made.labels(engine.model_name)

        self.spoken = named(Counter, "spoken_seconds", "Seconds of sound made.")
        self.first = named(
            Histogram,
            "first_sound_seconds",
            "From a text's submission to the first samples of its sound.",
            buckets=SECONDS,
        )
        self.dropped = named(
            Counter, "speech_tokens_dropped", "Tokens that were no code of their place."
        )


class Speaker:
    """One speech-synthesis model, for the event loop of its engine."""

    def __init__(self, engine: ServingEngine, voices: VoiceFiles, threads: int = 1) -> None:
        """Raises `ModelFileError` for a bad codec, `UnsupportedModel` without the CPU kernels."""
        self.engine, self.voices = engine, voices
        self._codec = open_speech_codec(voices, threads)
        # One thread: the sounds take turns, piece by piece.
        self._thread = ThreadPoolExecutor(1, "headrace-codec")
        self.metrics = SpeakingMetrics(engine)

    @classmethod
    def of(cls, engine: ServingEngine) -> Speaker:
        """Open the speaker of a model's folder. Raises what `open_voices` and `Speaker` raise."""
        return cls(engine, open_voices(engine.files.path, engine.files.arch.vocab_size))

    @property
    def rate(self) -> int:
        """Samples a second."""
        return self.voices.codec.rate

    def speak(
        self, text: str, voice: str, given: dict[str, Any], **options: Unpack[RequestOptions]
    ) -> Speaking:
        """Begin to speak a text. `given`: fields of `SamplingParams`, which override the folder's.

        Raises, before any work, what `ServingEngine.submit` raises, and `InvalidRequest` for an
        empty or too long text and for an unknown voice.
        """
        if not text.strip() or len(text) > MOST_CHARACTERS:
            raise InvalidRequest(
                f"input must have 1 to {MOST_CHARACTERS:,} characters, not only spaces",
                param="input",
            )
        # Text that looks like a special token is text.
        encode: Callable[[str], list[int]] = partial(self.engine.tokenizer.encode, special=False)
        prompt = self.voices.ids(encode, voice, text)
        sampling = SamplingParams(**{"max_tokens": None, **self.voices.sampling, **given})
        sampling.verify(self.engine.files.arch.vocab_size)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(63))
        sampling.stop_token_ids = [self.voices.end]
        return Speaking(self, prompt, sampling, options)

    async def run(self, work: Callable[[], Floats]) -> Floats:
        """Run `work` in the codec's thread; return its samples."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def begin(self, seed: int) -> Any:
        """Begin a new sound of the codec."""
        return self._codec.stream(seed % 2**64)


class Speaking:
    """One text on its way: samples as they come."""

    def __init__(
        self, speaker: Speaker, prompt: list[int], sampling: SamplingParams, options: RequestOptions
    ) -> None:
        self._speaker = speaker
        self._sound = speaker.begin(sampling.seed or 0)
        self._reader = FrameReader(speaker.voices)
        self._begun = time.monotonic()
        self.prompt_tokens, self.tokens, self.samples = len(prompt), 0, 0
        self.finish_reason = "stop"
        """stop: the model ended the sound; length: the context or the limit did."""
        self._stream = speaker.engine.submit(prompt, sampling, **options)

    def cancel(self) -> None:
        """End the model's work, if it still goes on."""
        self._stream.cancel()

    async def pieces(self) -> AsyncGenerator[Floats]:
        """Yield samples, fp32 from -1 to 1, in order. Raises the error that ended the sound, and
        `EngineFault` if the model wrote no frame at all."""
        metrics = self._speaker.metrics
        try:
            async for delta in self._stream:
                self.tokens += len(delta.token_ids)
                if delta.finish_reason == "abort":
                    raise Overloaded("the server ended this sound before it was complete")
                self.finish_reason = delta.finish_reason or self.finish_reason
                frames = self._reader.take(delta.token_ids)
                for at in range(0, len(frames), PIECE):
                    push = partial(self._sound.push, frames[at : at + PIECE])
                    samples = await self._speaker.run(push)
                    if len(samples):
                        yield self._counted(samples)
            none = np.zeros((0, len(self._speaker.voices.codec.levels)), np.int64)
            samples = await self._speaker.run(partial(self._sound.push, none, last=True))
            if not len(samples) and not self.samples:
                raise EngineFault("the model wrote no sound for this text")
            yield self._counted(samples)
        finally:
            self.cancel()
            metrics.dropped.inc(self._reader.dropped)
            metrics.spoken.inc(self.samples / self._speaker.rate)

    def _counted(self, samples: Floats) -> Floats:
        if not self.samples:
            self._speaker.metrics.first.observe(time.monotonic() - self._begun)
        self.samples += len(samples)
        return samples

"""Speech synthesis by a language model that writes the codes of a sound.

The codec is a part of the model in the engine process (`engine.loop.spoken`). Samples are outputs
of the request; the first come long before the model's last token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import Counter

from ...base.errors import EngineFault, Overloaded
from ...base.outputs import Samples
from ...base.sampling import SamplingParams
from ...speech.voices import VoiceFiles, open_voices
from .face import RequestOptions, ServingEngine
from .speaking import Floats, Speaking, SpeakingMetrics, SpeechClient, check_text, taken

FIELDS = "seed", "temperature", "top_p", "repetition_penalty", "max_tokens"


class CodecSpeaker:
    """One speech-synthesis model, for the event loop of its engine."""

    def __init__(self, engine: ServingEngine, voices: VoiceFiles) -> None:
        self.engine, self.files = engine, voices
        self.metrics = SpeakingMetrics(engine.registry).of(engine.model_name)
        self.dropped = Counter(
            "headrace_speech_tokens_dropped",
            "Tokens that were no code of their place.",
            ["model_name"],
            registry=engine.registry,
        ).labels(engine.model_name)

    @classmethod
    def of(cls, engine: ServingEngine) -> CodecSpeaker:
        """Open the speaker of a model's folder. Raises what `open_voices` raises."""
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
        """Begin to speak a text. `given`: `priority`, and fields of `SamplingParams` that override
        the folder's.

        Raises, before any work, what `ServingEngine.submit` raises, and `InvalidRequest` for an
        empty or too long text and for an unknown voice.
        """
        check_text(text)
        fields = taken(given, (*FIELDS, "priority"), self.engine.model_name)
        # Text that looks like a special token stays text.
        encode: Callable[[str], list[int]] = partial(self.engine.tokenizer.encode, special=False)
        prompt = self.files.ids(encode, voice, text)
        options: RequestOptions = {
            "request_id": client.request_id,
            "priority": fields.pop("priority", 0),
            "cache_salt": client.cache_salt,
            "task": "sound",
        }
        sampling = SamplingParams(**{"max_tokens": None, **self.files.sampling, **fields})
        sampling.verify(self.engine.files.arch.vocab_size)
        sampling.stop_token_ids = [self.files.end]
        return CodecSpeaking(self, prompt, sampling, options)


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
        self.prompt_tokens = len(prompt)
        self._stream = speaker.engine.submit(prompt, sampling, whole=True, **options)

    def cancel(self) -> None:
        self._stream.cancel()

    async def made(self) -> AsyncGenerator[Floats]:
        """Yield samples as they are decoded. Raises the error that ended the sound, and
        `EngineFault` if the model wrote no frame at all."""
        async for delta in self._stream:
            self.tokens += len(delta.token_ids) - (delta.void or 0)
            if delta.finish_reason == "abort":
                raise Overloaded("the server ended this sound before it was complete")
            self.finish_reason = delta.finish_reason or self.finish_reason
            if isinstance(delta.output, Samples):
                self._speaker.dropped.inc(delta.output.dropped)
                # Tokens are not heard: until the first samples the sound may start again.
                if delta.output.pieces and self._stream.show():
                    yield np.frombuffer(b"".join(delta.output.pieces), np.float32)
        if not self.samples:
            raise EngineFault("the model wrote no sound for this text")

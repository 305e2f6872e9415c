"""What a request at `/v1/audio/speech` may say. Without numpy: servers of text read it too."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .fields import Body, Integer, unsupported


class SpeechBody(Body):
    """What OpenAI's interface has, and of our own how tokens are drawn."""

    model: str | None = Field(None, description="Served name; none: the model that is served.")
    input: str = Field(description="The text, at most 4,096 characters.")
    voice: str = Field(description="One of the model's voices.")
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] | None = Field(
        None, description="mp3 where absent. pcm: 16 bits, little endian, at the codec's rate."
    )
    stream_format: Literal["audio", "sse"] | None = Field(
        None, description="audio (where absent): the file as it comes; sse: events."
    )
    speed: Any = unsupported(1, 1.0)
    instructions: Any = unsupported("")
    temperature: float | None = Field(None, description="By default as the model's folder says.")
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = Field(None, description="Same seed, same sound.")
    max_tokens: Integer | None = Field(None, description="Codes at most; none: the context's end.")
    priority: Integer | None = Field(None, ge=-(2**31), lt=2**31)

    def given(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that are set."""
        names = "temperature", "top_p", "repetition_penalty", "seed", "max_tokens"
        return {name: value for name in names if (value := getattr(self, name)) is not None}

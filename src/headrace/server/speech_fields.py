"""Body of `/v1/audio/speech`. It does not need numpy, because servers of text models import it
too."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .fields import Body, Integer, unsupported


class SpeechBody(Body):
    """OpenAI's fields, and our own for sampling."""

    model: str | None = Field(None, description="Served name; null: the served model.")
    input: str = Field(description="Text of at most 4,096 characters.")
    voice: str = Field(description="One of the model's voices.")
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] | None = Field(
        None, description="Default mp3. pcm: 16 bits, little endian, at the codec's rate."
    )
    stream_format: Literal["audio", "sse"] | None = Field(
        None, description="audio (default): the file while it is generated; sse: events."
    )
    speed: Any = unsupported(1, 1.0)
    instructions: Any = unsupported("")
    temperature: float | None = Field(None, description="Default: the value in the model's folder.")
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = Field(None, description="Same seed, same sound.")
    max_tokens: Integer | None = Field(
        None, description="Maximum codes; null: up to the context's end."
    )
    priority: Integer | None = Field(None, ge=-(2**31), lt=2**31)

    def given(self) -> dict[str, Any]:
        """Return the fields of `SamplingParams` that are set."""
        names = "temperature", "top_p", "repetition_penalty", "seed", "max_tokens"
        return {name: value for name in names if (value := getattr(self, name)) is not None}

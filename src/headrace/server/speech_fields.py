"""Body of `/v1/audio/speech`. It does not need numpy, because servers of text models import it
too."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .fields import Body, Integer


class SpeechBody(Body, neglects="speech"):
    """OpenAI's fields, and our own for sampling."""

    model: str | None = Field(None, description="Served name; null: the served model.")
    input: str = Field(description="Text of at most 4,096 characters.")
    voice: str = Field(description="One of the model's voices.")
    response_format: Literal["mp3", "opus", "flac", "wav", "pcm"] | None = Field(
        None, description="Default mp3. pcm: 16 bits, little endian, at the voice's rate."
    )
    stream_format: Literal["audio", "sse"] | None = Field(
        None, description="audio (default): the file while it is generated; sse: events."
    )
    speed: float | None = Field(
        None, description="Programs: from 0.25 to 4, default 1. Language models: only 1."
    )
    phonemes: bool | None = Field(
        None, description="Programs: input is phonemes of the voice's own, and no text."
    )
    timeout: float | None = Field(
        None, description="Programs: seconds to the deadline of the complete sound."
    )
    urgency: Literal["interactive", "batch"] | None = Field(
        None, alias="class", description="Programs: default interactive; batch comes last."
    )
    temperature: float | None = Field(
        None,
        description="Language models, as the next two; default: the value in the model's folder.",
    )
    top_p: float | None = None
    repetition_penalty: float | None = None
    seed: Integer | None = Field(None, description="Same seed, same sound.")
    max_tokens: Integer | None = Field(
        None, description="Language models: maximum codes; null: up to the context's end."
    )
    priority: Integer | None = Field(
        None, ge=-(2**31), lt=2**31, description="Language models: the smallest comes first."
    )

    def given(self) -> dict[str, Any]:
        """Return the set fields that a speaker may take; `speed` 1 counts as unset."""
        names = "temperature top_p repetition_penalty seed max_tokens priority phonemes timeout"
        found = {name: getattr(self, name) for name in names.split()}
        found |= {"class": self.urgency, "speed": None if self.speed == 1 else self.speed}
        return {name: value for name, value in found.items() if value is not None}

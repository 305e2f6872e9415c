"""Settings of a session, in OpenAI's two formats: the current one and the beta's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ...base.errors import InvalidRequest
from ...speech.languages import code_of
from ...speech.pauses import Pauses
from ..body import converted
from .pcm import PCM_RATES

LOGPROBS = "item.input_audio_transcription.logprobs"
_BETA_FORMATS = {
    "pcm16": ("audio/pcm", 24_000),
    "g711_ulaw": ("audio/pcmu", 8_000),
    "g711_alaw": ("audio/pcma", 8_000),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AudioFormat(_Strict):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: int | None = None


class ServerVad(_Strict):
    """Settings of turn detection. Fields about answers have no effect here and are accepted."""

    type: Literal["server_vad"] = "server_vad"
    threshold: float | None = Field(None, ge=0, le=1)
    prefix_padding_ms: int | None = Field(None, ge=0, le=5_000)
    silence_duration_ms: int | None = Field(None, ge=30, le=10_000)
    create_response: bool | None = None
    interrupt_response: bool | None = None
    idle_timeout_ms: None = None

    @property
    def pauses(self) -> Pauses:
        return Pauses(
            0.5 if self.threshold is None else self.threshold,
            (300 if self.prefix_padding_ms is None else self.prefix_padding_ms) / 1000,
            (500 if self.silence_duration_ms is None else self.silence_duration_ms) / 1000,
        )


class Transcription(_Strict):
    model: str | None = None
    language: str | None = Field(None, max_length=40)
    prompt: str | None = Field(None, max_length=16_384)


class AudioInput(_Strict):
    format: AudioFormat = Field(default_factory=AudioFormat)
    transcription: Transcription | None = Transcription.model_validate({})
    turn_detection: ServerVad | None = ServerVad.model_validate({})
    noise_reduction: None = None


class SessionAudio(_Strict):
    input: AudioInput = Field(default_factory=AudioInput)


class SessionFields(_Strict):
    """Session settings: `session` in `session.update` and in the answers."""

    type: Literal["transcription"] = "transcription"
    audio: SessionAudio = Field(default_factory=SessionAudio)
    include: list[Literal["item.input_audio_transcription.logprobs"]] | None = None

    @property
    def rate(self) -> int:
        given = self.audio.input.format
        return given.rate or (24_000 if given.type == "audio/pcm" else 8_000)

    def shown(self) -> dict[str, Any]:
        """Return the session as sent to the client, with the rate filled in."""
        plain = self.model_dump()
        plain["audio"]["input"]["format"]["rate"] = self.rate
        return plain

    @property
    def language(self) -> str | None:
        asked = self.audio.input.transcription
        return code_of(asked.language) if asked is not None and asked.language else None

    @property
    def prompt(self) -> str:
        asked = self.audio.input.transcription
        return (asked.prompt or "") if asked is not None else ""

    def updated(self, change: dict[str, Any]) -> SessionFields:
        """Return the settings with `change` applied; absent fields stay. Raises
        `InvalidRequest`."""
        changed = converted(_merged(self.model_dump(), change), SessionFields)
        given = changed.audio.input.format
        right = PCM_RATES if given.type == "audio/pcm" else (8_000,)
        if given.rate is not None and given.rate not in right:
            raise InvalidRequest(
                f"the rate of {given.type} must be one of {right}, not {given.rate}",
                param="session.audio.input.format.rate",
            )
        return changed


def of_beta(change: dict[str, Any]) -> dict[str, Any]:
    """Convert a change in the beta's format to the current one. Raises `InvalidRequest`."""
    source: dict[str, Any] = {}
    for name, value in change.items():
        if name == "input_audio_format":
            if value not in _BETA_FORMATS:
                known = ", ".join(_BETA_FORMATS)
                raise InvalidRequest(
                    f"input_audio_format must be one of {known}", param="session.input_audio_format"
                )
            kind, rate = _BETA_FORMATS[value]
            source["format"] = {"type": kind, "rate": rate}
        elif name in ("input_audio_transcription", "input_audio_noise_reduction"):
            source[name.removeprefix("input_audio_")] = value
        elif name == "turn_detection":
            source[name] = value
        elif name != "include":
            raise InvalidRequest(f"session.{name[:100]} is not a known parameter", param=name[:100])
    made: dict[str, Any] = {"audio": {"input": source}}
    return made | ({"include": change["include"]} if "include" in change else {})


def _merged(before: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    merged = dict(before)
    for name, value in change.items():
        held = merged.get(name)
        both = isinstance(held, dict) and isinstance(value, dict)
        merged[name] = _merged(held, value) if both and held is not None else value
    return merged

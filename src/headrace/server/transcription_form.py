"""Form and answer of a transcription, for the OpenAPI document."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from ..base.foreign import any_json

FORM: dict[str, Any] = any_json(Path(__file__).with_suffix(".json").read_bytes())
"""Schema of the form."""


class SecondsUsage(TypedDict):
    type: Literal["duration"]
    seconds: int


class HeardToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TranscriptionReply(TypedDict):
    text: str
    usage: SecondsUsage
    logprobs: NotRequired[list[HeardToken]]

"""Form and answer of a transcription, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

FORM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {
            "type": "string",
            "format": "binary",
            "description": "wav, flac, ogg, mp3, mp4, m4a or webm; detected from its bytes.",
        },
        "model": {"type": "string"},
        "language": {"type": "string", "description": "Code or English name; absent: detected."},
        "prompt": {"type": "string", "description": "Preceding text; names, spelling."},
        "response_format": {
            "type": "string",
            "enum": ["json", "text", "srt", "verbose_json", "vtt"],
            "default": "json",
        },
        "temperature": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
        "timestamp_granularities[]": {
            "type": "array",
            "items": {"type": "string", "enum": ["word", "segment"]},
        },
        "include[]": {"type": "array", "items": {"type": "string", "enum": ["logprobs"]}},
        "stream": {"type": "boolean", "default": False},
        "chunking_strategy": {
            "type": "string",
            "description": "auto, or a JSON object of type server_vad; absent: windows in order.",
        },
    },
    "required": ["file"],
}


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

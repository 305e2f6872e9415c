"""What the API process and the process that hears say to each other, beside `engine.messages`."""

from __future__ import annotations

import msgspec

from ...base.config import Decision, EngineOptions
from ...speech.voice import Pauses
from .. import messages


class HearOptions(msgspec.Struct, frozen=True, array_like=True):
    """What one sound's request asks for."""

    language: str | None = None
    """Code; None: that of the first window is detected."""
    task: str = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    """0: greedy, and higher ones where a text does not stand; else from here on."""
    beams: int = 1
    words: bool = False
    logprobs: bool = False
    pauses: Pauses | None = None
    """Stretches with speech, each for itself; None: all of it in order."""
    live: bool = False
    """Speech that still goes on: one greedy pass over what was said so far."""


class HeardSegment(msgspec.Struct, frozen=True, array_like=True):
    """`speech.transcript.Segment` on its way."""

    start: float
    """Seconds from the sound's begin."""
    end: float
    text: str
    tokens: list[int]
    temperature: float
    log_share: float
    no_speech: float
    compression: float
    words: list[tuple[str, float, float]]
    logprobs: list[tuple[str, float, bytes]]
    """Text, log probability and bytes of each token of text; empty where nobody asked."""


class SoundEnd(msgspec.Struct, frozen=True, array_like=True):
    """All of a sound was heard."""

    language: str
    """Empty where none was given and nothing was heard."""
    seconds: float
    left_out: list[tuple[float, float, str]]
    """Stretches without text: begin, end, reason."""


class OpenHearing(messages._Message):
    """The folder whose model is to be served."""

    options: EngineOptions
    folder: str


class Hear(messages._Message):
    """A sound to hear: `count` fp32 samples at 16 kHz in a file of the private folder."""

    request_id: str
    path: str
    count: int
    options: HearOptions


class Listening(messages.Started):
    """The model was loaded and has heard a window."""

    languages: list[str]
    """Codes; empty: English alone."""
    decisions: list[Decision]
    facts: dict[str, float]


class HeardSoFar(messages._Message):
    """New segments of a sound, and up to which second it is done."""

    request_id: str
    pieces: list[HeardSegment]
    upto: float
    end: SoundEnd | None = None


class HearingLoad(messages._Message):
    """How much the process has to do, told twice a second and when it changes."""

    running: int
    waiting: int
    busy_seconds: float
    """Spent on turns since the start."""


ToHearing = OpenHearing | Hear | messages.Abort | messages.Stop
FromHearing = (
    messages.Hello
    | messages.Phase
    | messages.Failed
    | messages.Busy
    | messages.Beat
    | messages.News
    | messages.Refused
    | Listening
    | HeardSoFar
    | HearingLoad
)

"""Messages between the API process and the transcription process, in addition to
`engine.messages`."""

from __future__ import annotations

import msgspec

from ...base.config import Decision, EngineOptions
from ...speech.voice import Pauses
from .. import messages


class HearOptions(msgspec.Struct, frozen=True, array_like=True):
    """The options of one transcription request."""

    language: str | None = None
    """Language code; None: that of the first window is detected."""
    task: str = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    """0: greedy, and higher ones if a text is rejected; otherwise from this temperature on."""
    beams: int = 1
    words: bool = False
    logprobs: bool = False
    pauses: Pauses | None = None
    """Stretches with speech, each transcribed separately; None: all of it in order."""
    live: bool = False
    """Speech that still goes on: one greedy pass over the speech so far."""


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
    """Text, log probability and bytes of each token of text; empty unless asked for."""


class SoundEnd(msgspec.Struct, frozen=True, array_like=True):
    """The end of a sound that was transcribed completely."""

    language: str
    """Empty if no language was given and no speech was found."""
    seconds: float
    left_out: list[tuple[float, float, str]]
    """Stretches without text: begin, end, reason."""


class OpenHearing(messages._Message):
    """The folder of the model that is to be served."""

    options: EngineOptions
    folder: str


class Hear(messages._Message):
    """A sound to transcribe: `count` fp32 samples at 16 kHz in a file of the private folder."""

    request_id: str
    path: str
    count: int
    options: HearOptions


class Listening(messages.Started):
    """The end of the start: the model was loaded and has transcribed a window."""

    languages: list[str]
    """Language codes; empty: English alone."""
    decisions: list[Decision]


class HeardSoFar(messages._Message):
    """New segments of a sound, and the second up to which it is done."""

    request_id: str
    pieces: list[HeardSegment]
    upto: float
    end: SoundEnd | None = None


class HearingLoad(messages._Message):
    """The load of the process, sent twice a second and when it changes."""

    running: int
    waiting: int
    busy_seconds: float
    """Seconds spent on turns since the start."""


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

"""Options and results of a transcription request, as sent between processes."""

from __future__ import annotations

import msgspec

from ...speech.pauses import Pauses


class HearOptions(msgspec.Struct, frozen=True, array_like=True):
    """The options of one transcription request."""

    language: str | None = None
    """Language code; None: detected from the first window."""
    task: str = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    """First temperature (0: greedy); a rejected text is decoded again at higher ones."""
    beams: int = 1
    words: bool = False
    logprobs: bool = False
    pauses: Pauses | None = None
    """Stretches with speech, each transcribed separately; None: all of it in order."""
    live: bool = False
    """Speech that still goes on: one greedy pass over the speech so far."""


class HeardSegment(msgspec.Struct, frozen=True, array_like=True):
    """`speech.transcript.Segment` as sent between processes."""

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

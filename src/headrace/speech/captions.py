"""Segments as SubRip (`.srt`) and WebVTT (`.vtt`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Said(Protocol):
    """A text between two times, in seconds."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def text(self) -> str: ...


def clock(seconds: float, mark: str) -> str:
    """Format hours, minutes, seconds and, after the mark, milliseconds: 01:02:03,004."""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{rest // 1000:02d}{mark}{rest % 1000:03d}"


def srt(segments: Sequence[Said], first: int = 1) -> str:
    """Return the captions, numbered from `first`."""
    return "".join(
        f"{number}\n{clock(one.start, ',')} --> {clock(one.end, ',')}\n{_line(one)}\n\n"
        for number, one in enumerate(segments, first)
    )


def vtt(segments: Sequence[Said], first: int = 1) -> str:
    """Return the captions; if they are the `first` (number 1), the file's header precedes them."""
    return ("WEBVTT\n\n" if first == 1 else "") + "".join(
        f"{clock(one.start, '.')} --> {clock(one.end, '.')}\n{_line(one)}\n\n" for one in segments
    )


def _line(segment: Said) -> str:
    """Return the text without line breaks, and without marks that would start a cue's times."""
    return " ".join(segment.text.split()).replace("-->", "->")

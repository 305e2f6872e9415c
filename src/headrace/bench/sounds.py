"""Recordings of a transcription load, and the record of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..base.errors import InvalidRequest
from ..media import AudioLimits, decode

SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".m4a", ".mp4", ".webm")
LIMITS = AudioLimits(bytes=1 << 30, memory=4 << 30, wall_seconds=900)


class Recording(NamedTuple):
    """A file, and its transcript if it has one."""

    name: str
    data: bytes
    seconds: float
    said: str | None


@dataclass(slots=True)
class HeardSound:
    """One request or session; times in seconds from the start of the run."""

    recording: Recording
    due: float
    begin: float = 0.0
    first: float = 0.0
    """Time of the first text."""
    end: float = 0.0
    text: str = ""
    error: str | None = None
    live: dict[str, float] = field(default_factory=dict)
    """Figures of a session, by their names in the result."""


def read_recordings(folder: Path) -> list[Recording]:
    """Read every sound below a folder, with the text in the `.txt` file of the same name.

    Raises `InvalidRequest` without any sound, or for one that cannot be read.
    """
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES):
        name, data, words = (
            str(path.relative_to(folder)),
            path.read_bytes(),
            path.with_suffix(".txt"),
        )
        said = words.read_text().strip() if words.is_file() else None
        found.append(Recording(name, data, decode(data, LIMITS, name).seconds, said))
    if not found:
        raise InvalidRequest(
            f"{folder} has no sound ({', '.join(SUFFIXES)}); what is said in talk.wav may stand in "
            "talk.txt beside it",
            param="folder",
        )
    return found

"""Options for cutting a sound at pauses; imports no numpy."""

from __future__ import annotations

from typing import NamedTuple


class Pauses(NamedTuple):
    """Options for cutting a sound at pauses."""

    threshold: float = 0.5
    """Threshold from 0 to 1; a frame is loud 18 times as many dB above the sound's 10th
    percentile."""
    padding: float = 0.21
    """Seconds kept on both sides of speech."""
    silence: float = 0.5
    """Seconds of silence; shorter gaps are bridged."""


USUAL_PAUSES = Pauses()

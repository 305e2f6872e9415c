"""Voice activity detection in real time: by loudness over frames of 30 ms.

A frame is loud if it is a number of dB above the preceding background level, and above -55 dBFS.
The background level follows quieter frames quickly and louder ones slowly, so a fan that is
switched on counts as quiet after some seconds. Speech begins with three loud frames of four. It
ends when no frame was loud for as long as the client set.
"""

from __future__ import annotations

from collections import deque
from enum import Enum

import numpy as np
import numpy.typing as npt

from ...media import RATE
from ...speech.pauses import Pauses

FRAME = 480
_FLOOR = -55.0
_RISE, _RISE_SPEAKING = 0.05, 0.003
"""Share by which the background level approaches a louder frame."""


class TurnChange(Enum):
    BEGAN = "began"
    ENDED = "ended"


class TurnFollower:
    """Detector for one stream of samples, a frame at a time."""

    def __init__(self, pauses: Pauses) -> None:
        self._above = 18.0 * pauses.threshold
        self._patience = max(1, round(pauses.silence * RATE / FRAME))
        self._quiet = -60.0
        self._recent: deque[bool] = deque(maxlen=4)
        self._silent = 0
        self.speaking = False

    def frame(self, samples: npt.NDArray[np.float32]) -> TurnChange | None:
        """Process the next `FRAME` samples; return a beginning or end of speech, or None."""
        power = float(np.dot(samples, samples)) / FRAME
        level = 10 * np.log10(power + 1e-10)
        loud = level > max(self._quiet + self._above, _FLOOR)
        rise = _RISE_SPEAKING if self.speaking or loud else _RISE
        self._quiet += (level - self._quiet) * (0.5 if level < self._quiet else rise)
        self._recent.append(bool(loud))
        if not self.speaking:
            if sum(self._recent) >= 3:
                self.speaking, self._silent = True, 0
                return TurnChange.BEGAN
            return None
        self._silent = 0 if loud else self._silent + 1
        if self._silent < self._patience:
            return None
        self.end()
        return TurnChange.ENDED

    def end(self) -> None:
        """End the current speech, whatever follows."""
        self.speaking = False
        self._recent.clear()

"""Token rules of a transcription request, and log softmax of one row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..base.spec import TimeRules
from ..loader.whisper_files import WhisperFiles

Floats = npt.NDArray[np.float32]
TICK = 0.02
"""Seconds between two timestamps."""


def rules_of(files: WhisperFiles, *, times: bool, begin: int, most: int = 0) -> TimeRules:
    """Return the rules of a text after `begin` tokens, with timestamps or without; `most`: see
    `TimeRules`."""
    special = files.special
    never = {
        *files.suppressed,
        special.start,
        special.translate,
        special.transcribe,
        special.previous,
        special.no_speech,
        special.no_timestamps,
        *special.languages.values(),
        # Any other ids between them are not text.
        *range(special.end + 1, special.first_timestamp),
    }
    if not times:
        never |= set(range(special.first_timestamp, files.vocab))
    never.discard(special.end)
    ids = tuple(sorted(never)), tuple(files.suppressed_first)
    return TimeRules(special.end, special.first_timestamp, *ids, times, begin, most)


def log_softmax(x: Floats) -> Floats:
    """Compute log softmax of one row, in fp32."""
    shifted = x - x.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum(dtype=np.float64)), np.float32)

"""Rules for the next token: suppressed tokens and the grammar of timestamps.

The rules are those of OpenAI's code (github.com/openai/whisper, MIT, `ApplyTimestampRules`). Times
come in pairs except before the end, and never go back. The first is at most one second in. If all
times together are likelier than any word, a time is next.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .files import WhisperFiles

Floats = npt.NDArray[np.float32]
TICK = 0.02
"""Seconds between two timestamps."""
_FIRST = 50
"""Latest first timestamp, in ticks."""


class Rules:
    """Rules of one window: with times or without."""

    def __init__(self, files: WhisperFiles, *, times: bool) -> None:
        special = files.special
        self._special, self._times = special, times
        never = [
            *files.suppressed,
            special.start,
            special.translate,
            special.transcribe,
            special.previous,
            special.no_speech,
            special.no_timestamps,
            *special.languages.values(),
            # Any other ids between them are no text.
            *range(special.end + 1, special.first_timestamp),
        ]
        if not times:
            never += range(special.first_timestamp, files.vocab)
        self._never = np.unique(np.array(never, np.int64))
        self._never = self._never[self._never != special.end]
        self._first = np.array(files.suppressed_first, np.int64)

    def log_shares(self, logits: Floats, said: Sequence[int]) -> Floats:
        """Compute log softmax of logits [vocab] over the tokens that may follow `said`; -inf for
        others."""
        x = logits.astype(np.float32, copy=True)
        x[self._never] = -np.inf
        if not said:
            x[self._first] = -np.inf
        if self._times:
            self._apply_times(x, said)
        first = self._special.first_timestamp
        x -= x.max()
        shares = np.exp(x)
        total, times = float(shares.sum()), float(shares[first:].sum())
        if self._times and times and np.log(times) > x[:first].max():
            x[:first], total = -np.inf, times
        x -= np.float32(np.log(total))
        return x

    def _apply_times(self, x: Floats, said: Sequence[int]) -> None:
        first, end = self._special.first_timestamp, self._special.end
        if not said:
            x[:first] = -np.inf
            x[first + _FIRST + 1 :] = -np.inf
            return
        is_time = [token >= first for token in said[-2:]]
        if is_time[-1]:
            if len(said) < 2 or is_time[0]:
                x[first:] = -np.inf
            else:
                x[:end] = -np.inf
        earlier = [token for token in said if token >= first]
        if earlier:
            # An open segment may not end where it began.
            forced = is_time[-1] and not (len(said) < 2 or is_time[0])
            x[first : earlier[-1] + (0 if forced else 1)] = -np.inf


def log_softmax(x: Floats) -> Floats:
    """Compute log softmax of one row, in fp32."""
    shifted = x - x.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum(dtype=np.float64)), np.float32)

"""Where somebody speaks: by loudness, over frames of 30 ms.

A frame is loud where its level is more than 9 dB above the sound's quiet tenth and above -55 dBFS
and not 35 dB below its loud twentieth. Gaps of less than half a second are bridged and a fifth of a
second is kept on both sides; spans are packed into chunks of at most 30 s, cut at the quietest
frame of their last five seconds where one is longer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .features import RATE, WINDOW

_FRAME = 480
_FRAME_SECONDS = _FRAME / RATE


class Pauses(NamedTuple):
    """How a sound is cut where nobody speaks."""

    threshold: float = 0.5
    """From 0 to 1; a frame is loud 18 times as many dB above the sound's quiet tenth."""
    padding: float = 0.21
    """Seconds kept on both sides of speech."""
    silence: float = 0.5
    """Seconds: shorter gaps are bridged."""


USUAL_PAUSES = Pauses()


def speech_spans(
    samples: npt.NDArray[np.float32], pauses: Pauses = USUAL_PAUSES
) -> list[tuple[int, int]]:
    """First sample and the one behind the last of each stretch with speech."""
    count = len(samples) // _FRAME
    if not count:
        return []
    frames = samples[: count * _FRAME].reshape(count, _FRAME)
    power = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / _FRAME
    level = 10 * np.log10(power + 1e-10)
    floor = max(
        min(np.quantile(level, 0.1) + 18 * pauses.threshold, np.quantile(level, 0.95) - 6), -55.0
    )
    loud = level > max(floor, np.quantile(level, 0.95) - 35)
    at = np.flatnonzero(loud)
    if not len(at):
        return []
    around = round(pauses.padding / _FRAME_SECONDS)
    breaks = np.flatnonzero(np.diff(at) > int(pauses.silence / _FRAME_SECONDS))
    firsts = [at[0], *at[breaks + 1]]
    lasts = [*at[breaks], at[-1]]
    return [
        (max(0, int(a) - around) * _FRAME, min(len(samples), (int(b) + 1 + around) * _FRAME))
        for a, b in zip(firsts, lasts, strict=True)
    ]


def chunks(
    samples: npt.NDArray[np.float32], pauses: Pauses = USUAL_PAUSES
) -> list[tuple[int, int]]:
    """Stretches of at most 30 s with all of the speech in them, in order, none over another."""
    found: list[tuple[int, int]] = []
    for begin, end in speech_spans(samples, pauses):
        begin = max(begin, found[-1][1]) if found else begin
        while end - begin > WINDOW:
            cut = _quietest(samples, begin + WINDOW - 5 * RATE, begin + WINDOW)
            found.append((begin, cut))
            begin = cut
        if found and end - found[-1][0] <= WINDOW and begin - found[-1][1] < 2 * RATE:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def _quietest(samples: npt.NDArray[np.float32], begin: int, end: int) -> int:
    """The middle of the quietest frame between two samples."""
    part = samples[begin:end]
    frames = part[: len(part) // _FRAME * _FRAME].reshape(-1, _FRAME)
    return begin + int((frames**2).sum(axis=1).argmin()) * _FRAME + _FRAME // 2

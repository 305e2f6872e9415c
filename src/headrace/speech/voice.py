"""Voice activity detection (VAD): by loudness, over frames of 30 ms.

A loud frame is more than 9 dB above the 10th percentile of the sound's levels, or above 6 dB below
the 95th if that is less. It is also above -55 dBFS and above 35 dB below the 95th percentile. Gaps
of less than half a second are bridged and a fifth of a second is kept on both sides. Spans are
packed into chunks of at most 30 s; a longer one is cut at the quietest frame of its last five
seconds.
"""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import numpy.typing as npt

from .features import RATE, WINDOW
from .pauses import USUAL_PAUSES, Pauses

_FRAME = 480
_FRAME_SECONDS = _FRAME / RATE
_PIECE = 10_000
"""Frames, five minutes, whose levels are computed at a time."""


def levels(
    samples: npt.NDArray[np.float32],
) -> Generator[None, None, npt.NDArray[np.float64]]:
    """Return the level of each frame of 30 ms, in dB; yield after every five minutes of sound, so
    that others can compute."""
    count = len(samples) // _FRAME
    level = np.empty(count)
    for first in range(0, count, _PIECE):
        if first:
            yield
        last = min(count, first + _PIECE)
        frames = samples[first * _FRAME : last * _FRAME].reshape(-1, _FRAME)
        power = np.einsum("ij,ij->i", frames, frames, dtype=np.float64) / _FRAME
        level[first:last] = 10 * np.log10(power + 1e-10)
    return level


def speech_spans(
    samples: npt.NDArray[np.float32],
    level: npt.NDArray[np.float64],
    pauses: Pauses = USUAL_PAUSES,
) -> list[tuple[int, int]]:
    """Return (first sample, sample after the last) of each stretch with speech. `level`: of each
    frame (`levels`)."""
    if not len(level):
        return []
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
) -> Generator[None, None, list[tuple[int, int]]]:
    """Return stretches of at most 30 s that contain all of the speech, in order, without overlap;
    yield as `levels`."""
    level = yield from levels(samples)
    found: list[tuple[int, int]] = []
    for begin, end in speech_spans(samples, level, pauses):
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
    """Return the middle of the quietest frame between two samples."""
    part = samples[begin:end]
    frames = part[: len(part) // _FRAME * _FRAME].reshape(-1, _FRAME)
    return begin + int((frames**2).sum(axis=1).argmin()) * _FRAME + _FRAME // 2

"""Log-mel features of a window of 30 s, like `transformers`' WhisperFeatureExtractor.

Frames of 400 samples every 160, a Hann window, power, filters on Slaney's scale with Slaney's
normalisation, log10 of at least 1e-10, at most 8 below the window's highest, (x + 4) / 4. The
transform is in float64, as there.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

RATE = 16_000
WINDOW = 30 * RATE
"""Samples of a window."""
FRAMES = 3_000
"""Frames of a window."""
_SIZE, _HOP = 400, 160
_AT_ONCE = 250
"""Frames transformed at a time."""


@functools.cache
def filters(mels: int, size: int = _SIZE) -> npt.NDArray[np.float64]:
    """Make [mels, size / 2 + 1]: triangles between 0 and 8 kHz on Slaney's scale, of equal area."""

    def to_mel(hertz: float) -> float:
        if hertz < 1_000:
            return 3 * hertz / 200
        return 15 + float(np.log(hertz / 1_000)) * 27 / float(np.log(6.4))

    marks = np.linspace(to_mel(0), to_mel(RATE / 2), mels + 2)
    edges = np.where(marks < 15, 200 * marks / 3, 1_000 * np.exp((marks - 15) * np.log(6.4) / 27))
    bins = np.linspace(0, RATE / 2, size // 2 + 1)
    slopes = edges[:, None] - bins
    widths = np.diff(edges)
    rising = -slopes[:-2] / widths[:-1, None]
    falling = slopes[2:] / widths[1:, None]
    area = 2.0 / (edges[2:] - edges[:-2])
    return np.maximum(0, np.minimum(rising, falling)) * area[:, None]


@functools.cache
def _triangles(
    mels: int, size: int
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64], list[int]]:
    """Return the bins of all filters, concatenated; the weight of each bin; the index where each
    filter begins."""
    all_bins = filters(mels, size)
    rows, bins = np.nonzero(all_bins)
    assert len(np.unique(rows)) == mels
    return bins, all_bins[rows, bins], np.searchsorted(rows, np.arange(mels)).tolist()


def through_filters(
    power: npt.NDArray[np.float64], mels: int, size: int = _SIZE
) -> npt.NDArray[np.float64]:
    """Return [frames, mels] of power [frames, size / 2 + 1]: the product with `filters`.

    Only one in forty numbers of `filters` is not zero. Also, numpy's matrix product leaves threads
    that spin for tens of milliseconds on the cores of our own thread pool.
    """
    bins, slopes, starts = _triangles(mels, size)
    return np.add.reduceat(power[:, bins] * slopes, starts, axis=1)


def log_mel(samples: npt.NDArray[np.float32], mels: int) -> npt.NDArray[np.float32]:
    """Compute [3000, mels] of up to 480,000 samples at 16 kHz; missing samples count as silence."""
    assert len(samples) <= WINDOW
    padded = np.zeros(WINDOW + _SIZE, np.float64)
    half = _SIZE // 2
    padded[half : half + len(samples)] = samples
    padded[:half] = padded[half + 1 : _SIZE + 1][::-1]
    padded[-half:] = padded[-_SIZE - 1 : -half - 1][::-1]
    frames = np.lib.stride_tricks.sliding_window_view(padded, _SIZE)[::_HOP][:FRAMES]
    hann = np.hanning(_SIZE + 1)[:-1]
    heard = min(FRAMES, -(-(half + len(samples)) // _HOP))
    log = np.full((FRAMES, mels), np.log10(1e-10))  # Of silence, which needs no transform.
    for first in range(0, heard, _AT_ONCE):  # All at once takes 30 MB.
        part = slice(first, min(first + _AT_ONCE, heard))
        power = np.abs(np.fft.rfft(frames[part] * hann, axis=1)) ** 2
        log[part] = np.log10(np.maximum(through_filters(power, mels), 1e-10))
    return np.asarray((np.maximum(log, log.max() - 8) + 4) / 4, np.float32)

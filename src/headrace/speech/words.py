"""Times of words: the cross attention of the heads that follow the sound, and the cheapest path
through it (dynamic time warping), as in OpenAI's code (`whisper/timing.py`, MIT).

The text of a window is decoded again in one step. Products of the aligning heads' q and the
window's K give a matrix [tokens, frames]. It is normalised, smoothed by a median of seven, and
averaged over the heads. The path through it gives the frame at which each token begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..models.sounds import HEAD_SIZE
from .files import WhisperFiles
from .network import Chunk, Network

Floats = npt.NDArray[np.float32]
_MEDIAN = 7
FRAME = 0.02
"""Seconds of a frame of the encoder's output."""
_APART = ("zh", "ja", "th", "lo", "my", "yue")
"""Languages without spaces between words: each character is one."""
_BEFORE = "\"'“¿([{-"
_BEHIND = "\"'.。,，!！?？:：”)]}、"


class Word(NamedTuple):
    text: str
    """Text with the space before it."""
    start: float
    """Time in seconds."""
    end: float


def align(network: Network, chunk: Chunk, first: int, frames: int) -> list[int]:
    """Return the frame at which each token of the chunk from index `first` on begins, and the last
    one's end.

    `chunk`: prefix, text and the end; `frames`: number of the window's frames that have sound.
    """
    files = network.files
    queries = network.queries(chunk._replace(wanted=[]))
    sums = np.zeros((len(chunk.tokens), frames))
    for layer, head in files.alignment:
        part = slice(head * HEAD_SIZE, (head + 1) * HEAD_SIZE)
        keys = network.keys[chunk.window][layer][:frames, part]
        scores = (queries[layer][:, part] @ keys.T) * np.float32(HEAD_SIZE**-0.5)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        deviation = shares.std(axis=0, keepdims=True)
        normal = (shares - shares.mean(axis=0, keepdims=True)) / np.maximum(deviation, 1e-10)
        sums += _smoothed(normal)
    rows, columns = cheapest_path(-sums[first:] / max(1, len(files.alignment)))
    jumps = np.diff(rows, prepend=-1) > 0
    return [int(column) for column in columns[jumps]]


def _smoothed(x: Floats) -> Floats:
    """Compute a median of seven along the frames, mirrored at the ends."""
    half = _MEDIAN // 2
    if x.shape[1] <= half:
        return x
    padded = np.pad(x, ((0, 0), (half, half)), mode="reflect")
    views = np.lib.stride_tricks.sliding_window_view(padded, _MEDIAN, axis=1)
    return np.asarray(np.median(views, axis=2), np.float32)


def cheapest_path(
    cost: npt.NDArray[np.floating],
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return rows and columns of the cheapest monotonous path through cost [n, m] from corner to
    corner.

    Steps go right, down or both; ties go to both, then down. The computation is by anti-diagonals,
    so that numpy does a whole one at a time.
    """
    n, m = cost.shape
    total = np.full((n + 1, m + 1), np.inf)
    total[0, 0] = 0
    step = np.zeros((n + 1, m + 1), np.int8)
    for diagonal in range(2, n + m + 1):
        i = np.arange(max(1, diagonal - m), min(n, diagonal - 1) + 1)
        j = diagonal - i
        three = np.stack([total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]])
        best = three.argmin(axis=0)
        total[i, j] = cost[i - 1, j - 1] + three[best, np.arange(len(i))]
        step[i, j] = best
    i, j = n, m
    rows, columns = [], []
    while i > 0 and j > 0:
        rows.append(i - 1)
        columns.append(j - 1)
        kind = step[i, j]
        i, j = i - (kind != 2), j - (kind != 1)
    return np.array(rows[::-1], np.intp), np.array(columns[::-1], np.intp)


def split_words(
    files: WhisperFiles, tokens: Sequence[int], language: str
) -> list[tuple[str, list[int]]]:
    """Split tokens into words with their text; punctuation alone joins the word that it belongs
    to."""
    units: list[tuple[str, list[int]]] = []
    held: list[int] = []
    for token in tokens:
        held.append(token)
        text = files.tokenizer.decode(held, skip_special_tokens=True)
        if "\ufffd" not in text:
            units.append((text, held))
            held = []
    if held:
        units.append((files.tokenizer.decode(held, skip_special_tokens=True), held))
    words: list[tuple[str, list[int]]] = []
    for text, own in units:
        alone = text.strip() and all(letter in _BEHIND for letter in text.strip())
        begins = text.startswith(" ") or language in _APART
        opens = words and all(letter in _BEFORE for letter in words[-1][0].strip())
        if words and (alone or not begins or (opens and not words[-1][0].endswith(" "))):
            words[-1] = (words[-1][0] + text, [*words[-1][1], *own])
        else:
            words.append((text, list(own)))
    return words

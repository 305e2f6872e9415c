"""Alignment of a text with its encoded input: the attention of the heads that follow the input, and
the cheapest path through it (dynamic time warping), as in OpenAI's code (`whisper/timing.py`, MIT).

Products of the aligning heads' q and the input's K give a matrix [tokens, frames]. It is
normalised, smoothed by a median of seven, and averaged over the heads. The path through it gives
the frame at which each token begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.arch import ModelArch
from ..base.outputs import Alignment
from ..base.spec import AlignmentWish
from ..base.step import Admission, StepPlan, StepResult
from ..kernels.arrays import host
from ..kernels.program import EVERY, Outputs
from ..models.whisper import QUERIES
from .features import RowWish

Floats = npt.NDArray[np.float32]
Keys = Mapping[int, Floats]
"""K [frames, width] by aligned layer."""
_MEDIAN = 7


class _Wished(NamedTuple):
    length: int
    """Tokens of the prompt."""
    wish: AlignmentWish


class Aligner(RowWish[_Wished]):
    """Alignment of rows that ask for it, once all of their tokens are computed."""

    want = EVERY

    def __init__(self, arch: ModelArch, keys: Callable[[int], Keys]) -> None:
        """`keys`: K of the input of a row."""
        super().__init__()
        assert arch.cross is not None
        self._heads, self._size, self._keys = arch.cross.aligned, arch.head_dim, keys
        self._queries: dict[int, dict[int, list[Floats]]] = {}
        """By row and layer: q of the chunks so far."""

    def wish(self, admission: Admission) -> _Wished | None:
        wish = admission.spec.alignment
        return None if wish is None else _Wished(admission.prompt_length, wish)

    def release(self, rows: Sequence[int]) -> None:
        super().release(rows)
        for row in rows:
            self._queries.pop(row, None)

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        begin = 0
        for entry, (row, start, count) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, strict=True)
        ):
            asked = self._rows.get(row)
            if asked is not None:
                kept = self._queries.setdefault(row, {})
                for layer in {layer for layer, _ in self._heads}:
                    rows = host(outputs.more[f"{QUERIES}.{layer}"])[begin : begin + count]
                    kept.setdefault(layer, []).append(rows.copy())
                if start + count == asked.length:
                    found = Alignment(self._align(row, asked))
                    result.outputs = {**(result.outputs or {}), entry: found}
            begin += count

    def _align(self, row: int, asked: _Wished) -> list[int]:
        """Return the frame at which each token from the first wished one on begins."""
        queries = {layer: np.concatenate(parts) for layer, parts in self._queries.pop(row).items()}
        keys, size, frames = self._keys(row), self._size, asked.wish.frames
        sums = np.zeros((asked.length, frames))
        for layer, head in self._heads:
            part = slice(head * size, (head + 1) * size)
            scores = (queries[layer][:, part] @ keys[layer][:frames, part].T) * np.float32(
                size**-0.5
            )
            shares = np.exp(scores - scores.max(axis=1, keepdims=True))
            shares /= shares.sum(axis=1, keepdims=True)
            deviation = shares.std(axis=0, keepdims=True)
            normal = (shares - shares.mean(axis=0, keepdims=True)) / np.maximum(deviation, 1e-10)
            sums += _smoothed(normal)
        rows, columns = cheapest_path(-sums[asked.wish.first :] / max(1, len(self._heads)))
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

"""Sampling filters beyond top-k, top-p and min-p, by llama.cpp's definitions; off by default.

As in llama.cpp they see the model's distribution before temperature. The most likely token of a
greedy row stays. Each is a threshold, so equal logits stay or go together. Thresholds stay arrays:
the host never waits for a device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..base.step import Admission
from ..kernels.arrays import Array
from ..kernels.program import LOGITS
from .arrays import exp, forbid, log, where
from .features import Indices, RowWish


class _Wish(NamedTuple):
    typical_p: float
    top_a: float
    top_n_sigma: float


class Filters(RowWish[_Wish]):
    """Top-n-sigma (Tang et al. 2024), locally typical sampling (Meister et al. 2022) and top-a."""

    want = LOGITS

    def wish(self, admission: Admission) -> _Wish | None:
        asked = admission.spec.sampling
        wish = _Wish(asked.typical_p, asked.top_a, asked.top_n_sigma)
        off = wish.typical_p >= 1 and wish.top_a == 0 and wish.top_n_sigma <= 0
        return None if off or asked.greedy else wish

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        for index, row in enumerate(rows.tolist()):
            wish = self._rows.get(row)
            if wish is None:
                continue
            line = logits[index]
            if wish.top_n_sigma > 0:
                forbid(line, line < _sigma_threshold(line, wish.top_n_sigma))
            if wish.typical_p < 1:
                _keep_typical(line, wish.typical_p)
            if wish.top_a > 0:
                peak = line.max()
                # p < a * p_max**2, with p = exp(logit - peak) * p_max.
                likeliest = 1 / exp(line - peak).sum()
                forbid(line, line < peak + log(likeliest * wish.top_a))


def _sigma_threshold(line: Array, n: float) -> Array:
    """Return `n` standard deviations below the largest of logits [V]."""
    known = line > -math.inf
    count = known.sum()
    mean = where(known, line, 0.0).sum() / count
    squares = where(known, line - mean, 0.0) ** 2
    return line.max() - n * (squares.sum() / count) ** 0.5


def _keep_typical(line: Array, mass: float) -> None:
    """Keep those logits of [V] whose surprise is nearest to the expected one, up to `mass`."""
    grown = exp(line - line.max())
    total = grown.sum()
    p = grown / total
    surprise = line.max() - line + log(total)
    expected = (p * where(line > -math.inf, surprise, 0.0)).sum()
    distance = abs(surprise - expected)
    order = distance.argsort()
    last = (p[order].cumsum(0) < mass).sum().clip(0, len(order) - 1)
    # As an array of one index: a number would be read from a device.
    forbid(line, distance > distance[order[last[None]]])

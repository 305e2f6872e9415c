"""Sampling filters beyond top-k, top-p and min-p, by llama.cpp's definitions; off by default.

As in llama.cpp they see the model's distribution before temperature. The most likely token of a
greedy row stays. Each is a threshold, so equal logits stay or go together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..base.step import Admission
from ..kernels.arrays import Array
from ..kernels.program import LOGITS
from .arrays import exp
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
                line[line < _sigma_threshold(line, wish.top_n_sigma)] = -math.inf
            if wish.typical_p < 1:
                _keep_typical(line, wish.typical_p)
            if wish.top_a > 0:
                peak = line.max()
                # p < a * p_max**2, with p = exp(logit - peak) * p_max.
                likeliest = float(1 / exp(line - peak).sum())
                line[line < peak + math.log(wish.top_a * likeliest)] = -math.inf


def _sigma_threshold(line: Array, n: float) -> float:
    """Return `n` standard deviations below the largest of logits [V]."""
    known = line[line > -math.inf]
    mean = known.mean()
    return float(known.max() - n * ((known - mean) ** 2).mean() ** 0.5)


def _keep_typical(line: Array, mass: float) -> None:
    """Keep those logits of [V] whose surprise is nearest to the expected one, up to `mass`."""
    grown = exp(line - line.max())
    total = grown.sum()
    p = grown / total
    surprise = line.max() - line + math.log(float(total))
    known = line > -math.inf
    expected = (p[known] * surprise[known]).sum()
    distance = abs(surprise - expected)
    order = distance.argsort()
    count = int((p[order].cumsum(0) < mass).sum())
    line[distance > distance[order[min(count, len(order) - 1)]]] = -math.inf

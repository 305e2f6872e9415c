"""Percentiles and confidence intervals, seeded for reproducible reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RESAMPLES = 400
PERCENTILES = (50, 75, 90, 95, 99)

T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 12: 2.179, 15: 2.131, 20: 2.086, 30: 2.042,
}  # fmt: skip
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary of a sample; `intervals` holds the 95 % interval of mean, p50 and p99."""

    count: int
    mean: float
    deviation: float
    low: float
    high: float
    percentiles: dict[str, float]
    intervals: dict[str, tuple[float, float]]


def describe(values: Sequence[float] | Array, seed: int = 0) -> Distribution | None:
    """Summarise a sample; None for an empty one. Percentiles interpolate between order
    statistics."""
    data = np.asarray(values, np.float64)
    if data.size == 0:
        return None
    points = np.percentile(data, PERCENTILES)
    statistics: dict[str, Callable[[Array], Array]] = {
        "mean": lambda table: np.asarray(table.mean(axis=1)),
        "p50": lambda table: np.asarray(np.percentile(table, 50, axis=1)),
        "p99": lambda table: np.asarray(np.percentile(table, 99, axis=1)),
    }
    return Distribution(
        count=int(data.size),
        mean=float(data.mean()),
        deviation=float(data.std(ddof=1)) if data.size > 1 else 0.0,
        low=float(data.min()),
        high=float(data.max()),
        percentiles={f"p{p}": float(v) for p, v in zip(PERCENTILES, points, strict=True)},
        intervals=_bootstrap(data, statistics, seed),
    )


def _bootstrap(
    data: Array, statistics: dict[str, Callable[[Array], Array]], seed: int
) -> dict[str, tuple[float, float]]:
    """Compute a percentile bootstrap; samples above 4,000 values are thinned before resampling."""
    if data.size < 2:
        return {name: (float(data[0]), float(data[0])) for name in statistics}
    rng = np.random.default_rng(seed)
    if data.size > 4000:
        data = rng.choice(data, 4000, replace=False)
    table = rng.choice(data, (RESAMPLES, data.size))
    result = {}
    for name, function in statistics.items():
        low, high = np.percentile(function(table), (2.5, 97.5))
        result[name] = (float(low), float(high))
    return result


def t_95(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, for the next smaller degree in the
    table."""
    known = [degree for degree in T_95 if degree <= freedom]
    return T_95[max(known)] if known and freedom <= 30 else 1.96 if freedom > 30 else T_95[1]


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return (ratio b / a, low, high) at 95 % from paired repeats.

    Student's t on the logarithms of the ratios: an influence on both runs of a pair cancels. One
    pair has no interval: (ratio, 0, inf).
    """
    logs = [math.log(b / a) for a, b in pairs]
    mean = sum(logs) / len(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    variance = sum((value - mean) ** 2 for value in logs) / (len(logs) - 1)
    half = t_95(len(logs) - 1) * math.sqrt(variance / len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def ratio_bootstrap(
    first: Sequence[float], second: Sequence[float], percentile: float | None
) -> tuple[float, float, float]:
    """Return (ratio second / first, low, high) of a percentile (None: the mean) of two samples."""
    rng = np.random.default_rng(0)
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)

    def statistic(table: Array) -> Array:
        if percentile is None:
            return np.asarray(table.mean(axis=-1))
        return np.asarray(np.percentile(table, percentile, axis=-1))

    # Pieces of one packet have the same timestamp, so their pause is zero.
    point = float(statistic(b) / max(float(statistic(a)), 1e-9))
    ratios = statistic(rng.choice(b, (RESAMPLES, b.size))) / np.maximum(
        statistic(rng.choice(a, (RESAMPLES, a.size))), 1e-9
    )
    low, high = np.percentile(ratios, (2.5, 97.5))
    return point, float(low), float(high)

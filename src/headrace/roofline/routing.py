"""Uneven routing of tokens to experts, and the load of the busiest rank.

The popularity of experts is a bounded power law: density x ** -skew between 1 and 0.8 · N, or, with
fewer choices than experts, between 0.01 and 2. The law and its exponents are those with which
`aiconfigurator` measures and predicts uneven routing (ai-dynamo/aiconfigurator,
collector/helper.py, `power_law_logits_v3`; its models take 1.01 for DeepSeek's and 1.2 for Qwen's,
Mixtral's and others). Here its quantiles stand for the experts, so that nothing is drawn.

Ranks of expert parallelism wait for the busiest one. Its load is the expected maximum of R sums:
balls into bins (Raab and Steger 1998), with unequal bins.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from ..base.arch import ModelArch

EVEN = 0.0
"""Skew with the same number of tokens for every expert: the best of a perfect balancer."""
DEEPSEEK_SKEW = 1.01
OTHERS_SKEW = 1.2


class Load(NamedTuple):
    """The experts of the busiest rank in one step; with one rank, of all experts."""

    hit: float
    """Experts that get a token."""
    pairs: float
    """(token, expert) pairs."""
    tokens: float
    """Distinct tokens, each with at least one expert there."""


def typical_skew(arch: ModelArch) -> float:
    """Return the exponent that is published for such a model; `EVEN` for a dense one."""
    if arch.moe is None:
        return EVEN
    return DEEPSEEK_SKEW if arch.mla is not None else OTHERS_SKEW


@lru_cache(maxsize=256)
def popularity(experts: int, active: int, tokens: int, skew: float) -> tuple[float, ...]:
    """Return the probability that a token chooses each expert, rising; they sum to `active`.

    Quantile (i - 1/2) / X of the bounded power law for expert i of X. At most 1, since a token
    chooses an expert once: the excess goes to the others in proportion.
    """
    if skew == EVEN:
        return (active / experts,) * experts
    low, high = (1.0, max(2.0, 0.8 * tokens)) if tokens * active > experts else (0.01, 2.0)
    power = 1 - skew or 1e-9  # At 1 the law's integral is a logarithm: the limit of its neighbours.
    first, last = low**power, high**power
    raw = [(first + (last - first) * (i + 0.5) / experts) ** (1 / power) for i in range(experts)]
    full = 0
    """Number of the most popular experts, which every token chooses."""
    while full < active:
        scale = (active - full) / sum(raw[: experts - full])
        if raw[experts - full - 1] * scale <= 1:
            break
        full += 1
    if full == active:
        return (0.0,) * (experts - full) + (1.0,) * full
    return tuple(x * scale for x in raw[: experts - full]) + (1.0,) * full


@lru_cache(maxsize=4096)
def padding(experts: int, active: int, tokens: int, skew: float, tile: int) -> float:
    """Return computed rows over demanded rows: each expert's rows are cut into whole tiles.

    Σ (1 - (1 - p) ** N) · ceil(N · p / (1 - (1 - p) ** N) / tile) · tile / (N · k).
    """
    if tile == 1:
        return 1.0
    rows = 0.0
    for p in popularity(experts, active, tokens, skew):
        hit = 1 - (1 - p) ** tokens
        if hit:
            rows += hit * math.ceil(tokens * p / hit / tile - 1e-9) * tile
    return rows / (tokens * active)


@lru_cache(maxsize=4096)
def busiest(experts: int, active: int, tokens: int, ranks: int, skew: float) -> Load:
    """Return the load of the busiest of `ranks` with X / R experts each, placed at random.

    M = N · k / R pairs are the mean. Their variance is that of counting, Σ p · (1 - p) · N / R, and
    that of the placement without replacement, N² · S² · (X / R) · (1 - 1 / R) with S² the variance
    of the popularities. Expected maximum: M + z · σ, z = Φ⁻¹((R - 3/8) / (R + 1/4)) (Blom 1958); no
    less than the most popular expert's own. Even routing (`EVEN`) is exactly even: M.
    """
    chances = popularity(experts, active, tokens, skew)
    hit = sum(1 - (1 - p) ** tokens for p in chances) / ranks
    mean = tokens * active / ranks
    if ranks == 1:
        return Load(hit, mean, tokens)
    pairs = mean
    if skew != EVEN:
        own = sum(p * (1 - p) for p in chances) * tokens / ranks
        average = active / experts
        spread = sum((p - average) ** 2 for p in chances) / (experts - 1)
        placed = tokens**2 * spread * (experts / ranks) * (1 - 1 / ranks)
        most = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
        pairs = max(mean + most * math.sqrt(own + placed), tokens * chances[-1])
        pairs = min(pairs, tokens * min(active, experts / ranks))
    share = pairs / (tokens * active) if tokens else 0.0
    return Load(hit, pairs, tokens * (1 - (1 - share) ** active))

"""Prompts and sampling for the tiny models."""

from __future__ import annotations

import random

from headrace.base.sampling import SamplingParams
from tiny import families


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids, the same for the same arguments."""
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(families.VOCAB) for _ in range(length)]


def sampling(**values) -> SamplingParams:
    """Greedy, 24 tokens, unless said otherwise."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **values})

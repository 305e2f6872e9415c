"""Rotary position tables, computed as the models' authors do: frequencies and angles in fp32.

Su et al. 2021 (RoFormer); "llama3" is the scaling of Llama 3.1, "yarn" Peng et al. 2023. Powers,
cosines and sines are rounded once, from fp64: those of fp32 libraries are off by more than half a
unit in the last place, each library's in other places.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..base.arch import Rope

Fp32 = npt.NDArray[np.float32]

BLOCK = 1024
"""Positions whose angles are held in fp64 at once."""


def inverse_frequencies(rope: Rope, head_dim: int) -> Fp32:
    """Return radians per token of each pair [head_dim / 2], fp32. `head_dim` is the count of a
    head's rotated numbers. The factors of "long" are not applied yet."""
    if rope.kind == "axial":
        return np.tile(inverse_frequencies(replace(rope, kind="plain"), head_dim // 2), 2)
    dimensions = np.arange(0, head_dim, 2, dtype=np.float32)
    waves = _power(rope.theta, dimensions / np.float32(head_dim))
    plain = np.float32(1) / waves
    if rope.kind == "proportional":
        plain[int(rope.share * head_dim / 2) :] = 0
        return plain
    if rope.kind == "dealt":
        return np.concatenate([plain[0::2], plain[1::2]])
    if rope.kind in ("plain", "long"):
        return plain
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return _yarn(rope, head_dim, waves)


def rope_table(rope: Rope, head_dim: int, positions: int) -> tuple[Fp32, Fp32]:
    """Return cos and sin of every position, [positions, rotated / 2] each, fp32.

    For "long", the number of positions selects one table of factors for all of them. So a written
    key never changes, and no answer depends on the division of a prompt into chunks.
    """
    rotated = rope.rotated(head_dim)
    frequencies = inverse_frequencies(rope, rotated)
    if rope.kind == "long":
        stretch = np.asarray(rope.divisors(positions), np.float32)
        frequencies = (np.float32(1) / (stretch * (np.float32(1) / frequencies))).astype(np.float32)
    cos, sin = np.empty((2, positions, rotated // 2), np.float32)
    for low in range(0, positions, BLOCK):
        part = np.arange(low, min(low + BLOCK, positions), dtype=np.float32)
        angles = (part[:, None] * frequencies).astype(np.float64)
        cos[low : low + BLOCK] = np.cos(angles)
        sin[low : low + BLOCK] = np.sin(angles)
    if rope.attention_factor != 1:
        cos *= np.float32(rope.attention_factor)
        sin *= np.float32(rope.attention_factor)
    return cos, sin


def _power(base: float, exponents: Fp32) -> Fp32:
    result: Fp32 = np.power(np.float64(base), exponents.astype(np.float64)).astype(np.float32)
    return result


def _llama3(rope: Rope, plain: Fp32) -> Fp32:
    """Stretch long waves by `factor`, keep short ones, and put a ramp in between."""
    # torch computes number / tensor as number · (1 / tensor); done alike for the same bits.
    one = np.float32(1)
    waves = (one / plain) * np.float32(2 * math.pi)
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    span = np.float32(rope.high_freq_factor - rope.low_freq_factor)
    if span == 0:  # As in Llama 4: there is no ramp.
        return np.where(waves > longest, plain / np.float32(rope.factor), plain)
    turns = (one / waves) * np.float32(rope.original_context)
    share = (turns - np.float32(rope.low_freq_factor)) / span
    factor = np.float32(rope.factor)
    ramp: Fp32 = (one - share) * plain / factor + share * plain
    stretched = np.where(waves > longest, plain / factor, plain)
    return np.where((waves <= longest) & (waves >= shortest), ramp, stretched)


def _yarn(rope: Rope, head_dim: int, waves: Fp32) -> Fp32:
    """Keep dimensions that turn often within the original context; stretch slow ones."""

    def dimension(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, head_dim - 1)
    width = np.float32(max(high - low, 0.001))
    pairs = np.arange(head_dim // 2, dtype=np.float32)
    one = np.float32(1)
    kept = one - ((pairs - np.float32(low)) / width).clip(0, 1)
    slow = (one / (np.float32(rope.factor) * waves)) * (one - kept)
    result: Fp32 = slow + (one / waves) * kept
    return result

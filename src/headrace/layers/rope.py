"""Rotary position tables, computed as the models' authors do: frequencies in fp32.

Su et al. 2021 (RoFormer); "llama3" is the scaling of Llama 3.1, "yarn" Peng et al. 2023.
"""

from __future__ import annotations

import math

import torch

from ..base.arch import Rope
from ..kernels.operators import RopeTable


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per token of each pair [head_dim / 2], fp32."""
    exponents = torch.arange(0, head_dim, 2).float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "plain":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    return _yarn(rope, head_dim, exponents)


def rope_table(rope: Rope, head_dim: int, positions: int, device: torch.device) -> RopeTable:
    """cos and sin of every position [positions, head_dim / 2]."""
    angles = torch.arange(positions).float().unsqueeze(1) * inverse_frequencies(rope, head_dim)
    factor = rope.attention_factor
    return RopeTable((angles.cos() * factor).to(device), (angles.sin() * factor).to(device))


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones stay, a ramp in between."""
    waves = 2 * math.pi / plain
    longest = rope.original_context / rope.low_freq_factor
    shortest = rope.original_context / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    share = (rope.original_context / waves - rope.low_freq_factor) / span
    ramp = (1 - share) * plain / rope.factor + share * plain
    stretched = torch.where(waves > longest, plain / rope.factor, plain)
    return torch.where((waves <= longest) & (waves >= shortest), ramp, stretched)


def _yarn(rope: Rope, head_dim: int, exponents: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often within the original context stay, slow ones are stretched."""

    def dimension(rotations: float) -> float:
        turns = rope.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    width = max(high - low, 0.001)
    kept = 1 - ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
    waves = rope.theta**exponents
    return (1.0 / (rope.factor * waves)) * (1 - kept) + (1.0 / waves) * kept

"""Qwen3 MoE (Yang et al. 2025): Qwen3 with a mixture of experts as feed-forward."""

from __future__ import annotations

from .decoder import Decoder


class Qwen3Moe(Decoder):
    """Experts, how many of them are active and how they are weighed: `ModelArch.moe`."""

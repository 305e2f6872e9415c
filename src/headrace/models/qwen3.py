"""Qwen3 (Yang et al. 2025): no biases, an RMS norm on each head of q and k."""

from __future__ import annotations

from .decoder import Decoder


class Qwen3(Decoder):
    """The norms are `ModelArch.qk_norm`."""

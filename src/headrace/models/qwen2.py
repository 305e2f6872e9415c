"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's decoder with biases on q, k and v."""

from __future__ import annotations

from .decoder import Decoder


class Qwen2(Decoder):
    """The biases are `ModelArch.qkv_bias`; small models tie the embedding to the head."""

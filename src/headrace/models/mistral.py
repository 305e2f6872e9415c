"""Mistral (Jiang et al. 2023): Llama's decoder, with a sliding window where the config has one."""

from __future__ import annotations

from .decoder import Decoder


class Mistral(Decoder):
    """The window is a number per layer in `ModelArch.windows`."""

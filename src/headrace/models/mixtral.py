"""Mixtral (Jiang et al. 2024): Mistral with a mixture of experts as feed-forward."""

from __future__ import annotations

from .decoder import Decoder


class Mixtral(Decoder):
    """The weights of the two active experts of eight are scaled to sum to one."""

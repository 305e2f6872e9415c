"""Llama 2 and 3.x (Touvron et al. 2023, Dubey et al. 2024): the plain pre-norm decoder."""

from __future__ import annotations

from .decoder import Decoder


class Llama(Decoder):
    """RMS norms, rotary positions (scaled from 3.1 on), grouped queries, SwiGLU."""

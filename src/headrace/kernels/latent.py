"""Queries to latents and back, a product for each head, over any operators: the specification.

A packed head is its rotated part, then what it is worth against a latent; so is the one key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..base.graph import LatentSpec
from .arrays import Array
from .weights import Weight

if TYPE_CHECKING:
    from .operators import Operators


def absorb(
    ops: Operators,
    q: Array,
    latent: Array,
    rotary: Array,
    spec: LatentSpec,
    packing: Sequence[Weight],
) -> Array:
    """q [N, H · (plain + rope)], latent [N, rank], rotary [N, rope] → [N, (H + 1) · E], of each
    head its rotary part and `packing` [rank, plain] · its plain part, then the key; nothing is
    rotated yet."""
    packed = _room(q, (spec.heads + 1) * spec.size)
    apart, plain = spec.queries // spec.heads, spec.plain_size
    for head, weight in enumerate(packing):
        x, at = q[:, head * apart : (head + 1) * apart], head * spec.size
        packed[:, at : at + spec.rope_size] = x[:, plain:]
        packed[:, at + spec.rope_size : at + spec.size] = ops.linear(x[:, :plain], weight, None)
    key = spec.heads * spec.size
    packed[:, key : key + spec.rope_size] = rotary
    packed[:, key + spec.rope_size :] = latent
    return packed


def unpack(ops: Operators, mixed: Array, spec: LatentSpec, unpacking: Sequence[Weight]) -> Array:
    """Sums over keys [R, H · E] → [R, H · V]: of each head `unpacking` [V, rank] · its latent."""
    values = _room(mixed, spec.heads * spec.value_size)
    for head, weight in enumerate(unpacking):
        latent = mixed[:, head * spec.size + spec.rope_size : (head + 1) * spec.size]
        at = head * spec.value_size
        values[:, at : at + spec.value_size] = ops.linear(latent, weight, None)
    return values


def _room(like: Array, width: int) -> Array:
    """Room for as many rows of its type, where it lies."""
    if hasattr(like, "new_empty"):
        return like.new_empty(len(like), width)
    return np.empty((len(like), width), like.dtype)

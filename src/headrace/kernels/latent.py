"""Specification of the per-head products from queries to latents and back, over any operators.

A packed head is its rotary part, then its plain part in latent space. The single key has the same
form.
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
    """Pack q [N, H · (plain + rope)], latent [N, rank] and rotary [N, rope] into [N, (H + 1) · E].
    A head becomes its rotary part and `packing` [rank, plain] · its plain part; the key follows
    them. Nothing is rotated yet."""
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
    """Unpack sums over keys [R, H · E] to [R, H · V]: `unpacking` [V, rank] · the latent of each
    head."""
    values = _room(mixed, spec.heads * spec.value_size)
    for head, weight in enumerate(unpacking):
        latent = mixed[:, head * spec.size + spec.rope_size : (head + 1) * spec.size]
        at = head * spec.value_size
        values[:, at : at + spec.value_size] = ops.linear(latent, weight, None)
    return values


def _room(like: Array, width: int) -> Array:
    """Allocate as many rows of the same type and device."""
    if hasattr(like, "new_empty"):
        return like.new_empty(len(like), width)
    return np.empty((len(like), width), like.dtype)

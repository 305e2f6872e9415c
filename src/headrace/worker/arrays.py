"""Operations that numpy arrays and torch tensors have under different names.

Logits and hidden states that our own kernels made in host memory are numpy arrays, and the process
has no torch; all others are tensors. Code that serves both uses the operations that both have
(indices, arithmetic, `sum(0)`) and these. (The array API standard would name them alike. But its
package is not on every machine that serves, and importing it costs more than writing these.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels.arrays import Array


def like(values: npt.NDArray[Any], array: Array) -> Array:
    """Convert `values` to the kind of `array`: the same numpy array, or a tensor on its device."""
    if isinstance(array, np.ndarray):
        return values
    # Local, as every torch import here: a process with tensors has imported torch already.
    from .transfer import to_device

    return to_device(values, array.device)


def copy(array: Array) -> Array:
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def exp(array: Array) -> Array:
    return np.exp(array) if isinstance(array, np.ndarray) else array.exp()


def log(array: Array) -> Array:
    return np.log(array) if isinstance(array, np.ndarray | np.generic) else array.log()


def where(condition: Array, array: Array, other: float) -> Array:
    """Return `array` where the condition holds, `other` elsewhere."""
    if isinstance(array, np.ndarray):
        return np.where(condition, array, np.float32(other))
    return array.where(condition, other)


def forbid(logits: Array, condition: Array) -> None:
    """Write -inf where the condition holds."""
    if isinstance(logits, np.ndarray):
        logits[condition] = -np.inf
    else:
        logits.masked_fill_(condition, -np.inf)


def fp32(array: Array) -> Array:
    """Convert to fp32; an array that is fp32 is returned unchanged."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float32, copy=False)
    return array.float()


def int64(array: Array) -> Array:
    return array.astype(np.int64) if isinstance(array, np.ndarray) else array.long()


def concatenate(parts: Sequence[Array]) -> Array:
    """Concatenate along the first axis."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(list(parts))


def stack(parts: Sequence[Array]) -> Array:
    """Stack along a new first axis."""
    if isinstance(parts[0], np.ndarray):
        return np.stack(parts)
    import torch

    return torch.stack(list(parts))


def normalised(vectors: Array) -> Array:
    """Scale vectors [R, D] to length one; a zero vector stays zero."""
    if isinstance(vectors, np.ndarray):
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-12)
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)

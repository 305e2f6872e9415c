"""What numpy arrays and torch tensors do under different names.

Where logits and hidden states lie in the host's memory and our own kernels made them they are numpy
arrays, and no torch is in the process; else they are tensors. Code that serves both uses what both
have (indices, arithmetic, `sum(0)`), and these. (The array API standard would name them alike; but
its package is not on every machine that serves, and to import it costs more than to write these.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..kernels.arrays import Array


def like(values: npt.NDArray[Any], array: Array) -> Array:
    """`values` as what `array` is: the same numpy array, or a tensor on its device."""
    if isinstance(array, np.ndarray):
        return values
    # Local, as every torch here: who has tensors has torch already.
    from .transfer import to_device

    return to_device(values, array.device)


def copy(array: Array) -> Array:
    return array.copy() if isinstance(array, np.ndarray) else array.clone()


def exp(array: Array) -> Array:
    return np.exp(array) if isinstance(array, np.ndarray) else array.exp()


def fp32(array: Array) -> Array:
    """In fp32; the same array where it is."""
    if isinstance(array, np.ndarray):
        return array.astype(np.float32, copy=False)
    return array.float()


def int64(array: Array) -> Array:
    return array.astype(np.int64) if isinstance(array, np.ndarray) else array.long()


def concatenate(parts: Sequence[Array]) -> Array:
    """Along the first axis."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(list(parts))


def stack(parts: Sequence[Array]) -> Array:
    """Along a new first axis."""
    if isinstance(parts[0], np.ndarray):
        return np.stack(parts)
    import torch

    return torch.stack(list(parts))


def normalised(vectors: Array) -> Array:
    """Vectors [R, D] of length one; one of zeros stays."""
    if isinstance(vectors, np.ndarray):
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-12)
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-12)

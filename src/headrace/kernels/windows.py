"""The node `window`: consecutive rows side by side, as a view."""

from __future__ import annotations

import numpy as np

from ..base.graph import WindowSpec
from .arrays import Array, contiguous


def windows(x: Array, spec: WindowSpec) -> Array:
    """Return [M, width · C] of x [N, C]: see `WindowSpec`. Rows overlap in memory: read only."""
    count, columns = x.shape
    shape, step = (spec.rows(count), spec.width * columns), spec.stride * columns
    whole = x
    if spec.before or not contiguous(x):
        size = count + spec.before, columns
        whole = np.zeros(size, x.dtype) if isinstance(x, np.ndarray) else x.new_zeros(size)
        whole[spec.before :] = x
    if isinstance(whole, np.ndarray):
        strides = step * whole.itemsize, whole.itemsize
        return np.lib.stride_tricks.as_strided(whole, shape, strides, writeable=False)
    return whole.as_strided(shape, (step, 1))

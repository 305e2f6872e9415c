"""Reference of convolutions and group norms over pictures, whose rows are places line by line, and
of attention to other rows or with biases by distance."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..base.denoising import strip_of
from ..base.graph import AttentionSpec, GroupNormSpec, PictureConvSpec
from .arrays import Array, joined


def convolve(x: Array, spec: PictureConvSpec, product: Callable[[Array], Array]) -> list[Array]:
    """Return the strips of a convolution's result. `product`: that of rows [·, side² · C]."""
    high, wide = (each * spec.up - spec.cut for each in (spec.lines, spec.columns))
    lines, columns = spec.made
    read = spec.lines * spec.columns
    count = len(x) // read * lines * columns
    padded = joined([x, 0 * x[:1]], 0)  # The last row is outside of all pictures.
    if not count:  # A step without pictures.
        return [product(joined([x[:0]] * spec.side**2, 1))]
    found = []
    for first in range(0, count, step := strip_of(count)):
        place = np.arange(first, first + step)
        line, column = place // columns % lines, place % columns
        around = np.arange(spec.side) - spec.side // 2
        i = (line * spec.stride)[:, None, None] + around[:, None]
        j = (column * spec.stride)[:, None, None] + around
        inside = (i >= 0) & (i < high) & (j >= 0) & (j < wide)
        rows = (place // (lines * columns) * read)[:, None, None]
        rows = rows + i // spec.up * spec.columns + j // spec.up
        rows = np.where(inside, rows, len(x)).reshape(step, -1)
        found.append(product(padded[rows].reshape(step, -1)))
    return found


def group_norm(x: Array, spec: GroupNormSpec, gain: Array, shift: Array, entries: int) -> Array:
    """Return the norm of rows of so many entries of one size, without the activation."""
    if not entries:
        return x
    parts = x.reshape(entries, -1, spec.groups, x.shape[1] // spec.groups)
    count = parts.shape[1] * parts.shape[3]
    centred = parts - (parts.sum(3).sum(1) / count)[:, None, :, None]
    spread = (centred * centred).sum(3).sum(1) / count + spec.eps
    return (centred / (spread**0.5)[:, None, :, None]).reshape(x.shape) * gain + shift


def attend(
    q: npt.NDArray[np.float32],
    kv: npt.NDArray[np.float32],
    spec: AttentionSpec,
    bounds: npt.NDArray[np.int32],
    keys: npt.NDArray[np.int32],
    bias: npt.NDArray[np.float32] | None,
) -> npt.NDArray[np.float32]:
    """Return softmax(scale · q · kᵀ + bias) · v of each entry: its rows of q [N, H · E] are those
    of `bounds`, those of k and v, side by side, of `keys`. `bias`: see `AttentionSpec.reach`."""
    found = np.empty((len(q), spec.queries), np.float32)
    for (low, high), (first, last) in zip(pairwise(bounds), pairwise(keys), strict=True):
        heads = q[low:high, : spec.queries].reshape(-1, spec.heads, spec.size).transpose(1, 0, 2)
        k, v = kv[first:last].reshape(-1, 2, spec.heads, spec.size).transpose(1, 2, 0, 3)
        scores = np.float32(spec.scale) * (heads @ k.transpose(0, 2, 1))
        if bias is not None:
            behind = np.arange(last - first) - np.arange(high - low)[:, None] + spec.reach - 1
            scores += bias.reshape(spec.heads, -1)[:, behind]
        shares = np.exp(scores - scores.max(2, keepdims=True))
        mixed = (shares / shares.sum(2, keepdims=True)) @ v
        found[low:high] = mixed.transpose(1, 0, 2).reshape(high - low, -1)
    return found

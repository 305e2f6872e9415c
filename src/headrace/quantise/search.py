"""Scales of groups that lose least on the text: candidates judged by the group's block of the Gram
matrix, and no forward pass.

Groups lie first: weights [groups, rows, size], their blocks of G [groups, size, size]. For given
codes c the best scale of w ≈ s · c is (w G c) / (c G c), and the error it leaves is known with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Nearest = Callable[[Floats], Floats]
"""Function from scaled weights to the values of their nearest codes."""
STEPS = range(-9, 10, 2)
"""Places next to the last code that the largest weight is tried at, in tenths of a code."""
PIECE = 1 << 18
"""Weights that are searched at once: they stay in the processor's cache."""


def blocks_of(gram: Floats, size: int) -> Floats:
    """Return the diagonal blocks [groups, size, size] of G [in, in], damped so that a column that
    the text never used still counts a little. A G [in] is a diagonal alone."""
    groups, at = len(gram) // size, np.arange(size)
    if gram.ndim == 1:
        blocks = np.zeros((groups, size, size), np.float32)
        blocks[:, at, at] = gram.reshape(groups, size)
    else:
        view = gram.reshape(groups, size, groups, size)
        blocks = np.ascontiguousarray(view[np.arange(groups), :, np.arange(groups)])
    mean = float(blocks[:, at, at].mean()) or 1.0
    blocks[:, at, at] += np.float32(0.01 * mean)
    return blocks


def pieces(groups: int, rows: int, size: int) -> Iterator[slice]:
    """Yield slices of rows of `PIECE` weights each."""
    step = max(8, PIECE // (groups * size))
    return (slice(first, first + step) for first in range(0, rows, step))


def symmetric(
    w: Floats, blocks: Floats, last: float, nearest: Nearest, unit: float = 0.1
) -> Floats:
    """Return the scale [groups, rows] of w ≈ s · code; `last`: size of the code that the largest
    weight takes, on the side where the codes reach furthest; `unit`: step of the candidates."""
    scale = np.empty(w.shape[:2], np.float32)
    for rows in pieces(*w.shape):
        scale[:, rows] = _symmetric(w[:, rows], blocks, last, nearest, unit)
    return scale


def _symmetric(w: Floats, blocks: Floats, last: float, nearest: Nearest, unit: float) -> Floats:
    at = np.abs(w).argmax(-1)
    top = np.take_along_axis(w, at[..., None], -1)[..., 0]
    best, scale = np.full(top.shape, -1, np.float32), np.zeros(top.shape, np.float32)
    for step in STEPS:
        with np.errstate(divide="ignore"):
            inverse = np.where(top != 0, np.float32(-(last + unit * step)) / top, 0)
        codes = nearest(w * inverse[..., None])
        weighted = codes @ blocks
        along = (weighted * w).sum(-1)
        across = (weighted * codes).sum(-1)
        found = np.divide(along, across, out=np.zeros_like(along), where=across > 0)
        gain = along * found
        better = gain > best
        best = np.where(better, gain, best)
        scale = np.where(better, found, scale)
    return scale


def affine(w: Floats, blocks: Floats, last: int) -> tuple[Floats, Floats]:
    """Return (scale, minimum ≥ 0), both [groups, rows], of w ≈ scale · code - minimum with codes
    from 0 to `last`."""
    found = np.empty((2, *w.shape[:2]), np.float32)
    for rows in pieces(*w.shape):
        found[:, :, rows] = _affine(w[:, rows], blocks, last)
    return found[0], found[1]


def _affine(w: Floats, blocks: Floats, last: int) -> tuple[Floats, Floats]:
    low = np.minimum(w.min(-1), 0)
    span = np.maximum(w.max(-1) - low, 0)
    ones = blocks.sum(-1)[:, None]
    linear = (w * ones).sum(-1)
    total = blocks.sum((1, 2))[:, None]
    best = np.full(span.shape, np.inf, np.float32)
    scale, least = np.zeros_like(span), -low
    for step in STEPS:
        inverse = np.divide(
            np.float32(last + 0.1 * step), span, out=np.zeros_like(span), where=span > 0
        )
        codes = np.clip(np.rint((w - low[..., None]) * inverse[..., None]), 0, last)
        weighted = codes @ blocks
        two, one = (weighted * codes).sum(-1), weighted.sum(-1)
        along = (weighted * w).sum(-1)
        ground = total * two - one * one
        known = ground > 1e-5 * total * two
        safe = np.where(known, ground, 1)
        slope = (total * along - one * linear) / safe
        offset = (two * linear - one * along) / safe
        # A format of this kind has no minimum above zero: then the line goes through it.
        through = np.divide(along, two, out=np.zeros_like(two), where=two > 0)
        flat = (offset > 0) | ~known
        slope, offset = np.where(flat, through, slope), np.where(flat, 0, offset)
        error = -(slope * along + offset * linear)
        better = (error < best) & (slope >= 0)
        best = np.where(better, error, best)
        scale = np.where(better, slope, scale)
        least = np.where(better, -offset, least)
    return scale.astype(np.float32), least.astype(np.float32)


def among(w: Floats, blocks: Floats, scales: Floats, nearest: Nearest) -> Floats:
    """Return the best of given scales [candidates, groups, rows] for each group: for formats whose
    scales cannot take any value."""
    best = np.full(w.shape[:2], np.inf, np.float32)
    found: Floats = scales[0].copy()
    for candidate in scales:
        inverse = np.divide(1, candidate, out=np.zeros_like(candidate), where=candidate != 0)
        for rows in pieces(*w.shape):
            off = nearest(w[:, rows] * inverse[:, rows, None])
            off *= candidate[:, rows, None]
            off -= w[:, rows]
            error = ((off @ blocks) * off).sum(-1)
            better = error < best[:, rows]
            best[:, rows] = np.where(better, error, best[:, rows])
            found[:, rows] = np.where(better, candidate[:, rows], found[:, rows])
    return found


def among_lines(w: Floats, blocks: Floats, pairs: Floats, nearest: Nearest) -> npt.NDArray[np.intp]:
    """Return the numbers [groups, rows] of the best of given pairs of scale and minimum
    [candidates, 2, groups, rows], of w ≈ scale · code - minimum."""
    best = np.full(w.shape[:2], np.inf, np.float32)
    found = np.zeros(w.shape[:2], np.intp)
    for number, (scale, least) in enumerate(pairs):
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        for rows in pieces(*w.shape):
            moved = w[:, rows] + least[:, rows, None]
            off = nearest(moved * inverse[:, rows, None])
            off *= scale[:, rows, None]
            off -= moved
            error = ((off @ blocks) * off).sum(-1)
            better = error < best[:, rows]
            best[:, rows] = np.where(better, error, best[:, rows])
            found[:, rows] = np.where(better, number, found[:, rows])
    return found

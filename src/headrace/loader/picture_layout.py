"""Inputs of an encoder's step that follow from the shape of a picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.modelfiles import ModelFiles
from ..models.picture_arch import CHANNELS, PictureArch
from .pictures import read_tensor

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
KEPT = 8
"""Maximum shapes whose numbers are cached."""


class Layout(NamedTuple):
    """Inputs of an item's step in addition to its units."""

    turns: Numbers
    """`StepBatch.turns`: row and column of each patch."""
    windows: npt.NDArray[np.int32] | None
    """`StepBatch.windows`."""
    back: Numbers | None
    """Row of the encoder for each row of the prompt; None: both have the same order."""
    given: tuple[Floats, ...] = ()
    """Further inputs of the graph."""


Layouts = Callable[[int, int], Layout]
"""Function of a picture's units and the rows per row of its grid (`InputSpan.columns`)."""


def layouts(files: ModelFiles, picture: PictureArch) -> Layouts | None:
    """Return the layouts of an encoder; None if its graph needs nothing but patches."""
    if not picture.gridded:
        return None
    names = [*picture.beside] if picture.token is None else []

    def of(units: int, columns: int) -> Layout:
        wide, extra = columns * picture.factor, picture.extra
        order, windows, back = picture.laid(units // wide, wide)
        turns = np.ascontiguousarray(np.array(order, np.int64).T)
        if extra:  # Class tokens are not turned, and stand before the first patch.
            turns = np.pad(turns[:, : units - extra] + 1, ((0, 0), (0, extra)))
        tables = (read_tensor(files, picture, name) for name in names)
        return Layout(
            turns,
            np.array(windows, np.int32) if windows else None,
            np.array(back, np.int64) if back else None,
            tuple(between(table, turns, units // wide, wide) for table in tables),
        )

    return lru_cache(maxsize=KEPT)(of)


def of_frames(rows: Floats, width: int) -> Floats:
    """Return patches [N, width] in which each frame repeats `rows` [N, n], channel by
    channel."""
    count, frames = len(rows), width // rows.shape[1]
    return rows.reshape(count, CHANNELS, 1, -1).repeat(frames, 2).reshape(count, width)


def between(table: Floats, turns: Numbers, rows: int, columns: int) -> Floats:
    """Interpolate a square table [side², D] at the places [2, N] of a grid stretched over it.

    The corners of grid and table coincide. A place between four rows of the table gets their
    bilinear sum, in fp32 and in transformers' order of additions.
    """
    side = round(len(table) ** 0.5)
    taps: list[Numbers] = []
    shares: list[Floats] = []
    for places, count in zip(turns, (rows, columns), strict=True):
        at = (places.astype(np.float32) * np.float32(side - 1)) / np.float32(max(count - 1, 1))
        low = np.floor(at)
        taps.append(np.minimum(low[:, None].astype(np.int64) + np.arange(2), side - 1))
        distance = np.abs(at[:, None] - low[:, None] - np.array([0, 1], np.float32))
        shares.append(np.maximum(np.float32(1) - distance, np.float32(0)))
    found = np.zeros((turns.shape[1], table.shape[1]), np.float32)
    for high in range(2):
        for wide in range(2):
            share = shares[0][:, high] * shares[1][:, wide]
            found += table[taps[0][:, high] * side + taps[1][:, wide]] * share[:, None]
    return found

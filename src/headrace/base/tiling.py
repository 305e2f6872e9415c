"""Sizes of a picture as Idefics3's processor resizes and splits it (Laurençon et al. 2024).

The numbers are those of transformers' `Idefics3ImageProcessorPil`, which computes on Pillow alone.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_SIDE = 4_096
"""Longest side of a picture after the first resize, whatever is asked for."""


class Tiling(NamedTuple):
    """Sizes by which a model's processor cuts pictures."""

    longest: int
    """Pixels of the longest side after the first resize."""
    tile: int
    """Pixels of a side of a tile."""
    split: bool
    """Whether a picture larger than a tile is split, with one tile more for the whole."""


class Cut(NamedTuple):
    """Sizes (width, height) that a picture gets one after the other, and its tiles."""

    first: tuple[int, int]
    second: tuple[int, int]
    rows: int
    """0: the picture is one tile."""
    columns: int

    @property
    def tiles(self) -> int:
        """Number of tiles, the whole picture's included."""
        return self.rows * self.columns + 1


def cut(width: int, height: int, tiling: Tiling) -> Cut:
    """Return what becomes of a picture of this size, in pixels."""
    side = tiling.tile
    first = _below(*_scaled(width, height, tiling.longest))
    if not tiling.split:
        return Cut(first, (side, side), 0, 0)
    width, height = first
    ratio = width / height
    if width >= height:
        width = _multiple(width, side)
        height = _multiple(int(width / ratio), side)
    else:
        height = _multiple(height, side)
        width = _multiple(int(height * ratio), side)
    if max(width, height) <= side:
        return Cut(first, (width, height), 0, 0)
    return Cut(first, (width, height), height // side, width // side)


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Scale the longest side to `longest`; the other one gets an even number of pixels."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _below(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > MOST_SIDE:
        width, height = MOST_SIDE, int(MOST_SIDE / ratio)
    elif height > width and height > MOST_SIDE:
        width, height = int(MOST_SIDE * ratio), MOST_SIDE
    return max(width, 1), max(height, 1)


def _multiple(length: int, side: int) -> int:
    return -(-length // side) * side

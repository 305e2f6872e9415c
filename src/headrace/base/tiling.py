"""Sizes of a picture as the processors of models resize and split it.

The numbers are those of transformers' processors that compute on Pillow alone: a `Tiling` is
Idefics3's (Laurençon et al. 2024), a `Fitting` Qwen2-VL's (Wang et al. 2024), a `Matching`
InternVL's, a `Panning` Gemma 3's, a `Bounding` Pixtral's, a `Padding` Llama 4's, a `Filming` that
of Qwen3-VL's videos.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from .filming import single

MOST_SIDE = 4_096
"""Maximum side of a tiled picture after the first resize, whatever the client asks for."""
MOST_RATIO = 200
"""Maximum ratio of a fitted picture's longer side to its shorter one."""
SMALL = 512**2
"""Maximum pixels of a fitted picture with little detail."""


class TooNarrow(ValueError):
    """Failure: one side of a picture is too long compared with the other."""


class Tiling(NamedTuple):
    """A picture is resized, and split into square tiles."""

    longest: int
    """Pixels of the longest side after the first resize."""
    tile: int
    """Pixels of a side of a tile."""
    split: bool
    """Whether a picture larger than a tile is split, with one tile more for the whole."""

    def small(self) -> Tiling:
        """Return the rule for a picture with little detail: one tile."""
        return self._replace(split=False)


class Fitting(NamedTuple):
    """A picture keeps its shape: it is resized to whole squares and stays one tile."""

    square: int
    """Pixels of a side of a square."""
    least: int
    """Fewest pixels of the result."""
    most: int

    @property
    def largest(self) -> int:
        """Bound on the pixels of a result: those of the longest strip of squares may be more than
        `most`, and a small picture grows beyond `least`."""
        strip, grown = MOST_RATIO * self.square**2, 15 * self.square * math.isqrt(self.least)
        return max(self.most, strip, self.least + grown + self.square**2)

    def small(self) -> Fitting:
        """Return the rule for a picture with little detail."""
        return self._replace(most=max(self.least, min(self.most, SMALL)))


class Matching(NamedTuple):
    """A picture is resized to the grid of square tiles with the nearest shape and split into these.
    One tile more has the whole (InternVL, Chen et al. 2024)."""

    tile: int
    """Pixels of a side of a tile."""
    least: int
    """Fewest tiles of a grid."""
    most: int

    def small(self) -> Matching:
        """Return the rule for a picture with little detail: one tile."""
        return self._replace(least=1, most=1)


class Reducing(NamedTuple):
    """A picture stays one tile of its own shape, and is made smaller if a side is too long."""

    longest: int
    """Maximum pixels of a side."""

    def small(self) -> Reducing:
        """Return the rule for a picture with little detail: the same."""
        return self


class Panning(NamedTuple):
    """A picture becomes one square tile. If it is long, it is also cut into parts along its longer
    side. These follow, each resized in the same way (Gemma 3's "pan and scan")."""

    tile: int
    """Pixels of a side of a tile."""
    most: int = 0
    """Maximum parts; 0: none are made."""
    least: int = 1
    """Minimum pixels of a side of a part."""
    ratio: float = 1.0
    """Minimum ratio of the longer to the shorter side at which a picture is cut."""

    def small(self) -> Panning:
        """Return the rule for a picture with little detail: one tile."""
        return self._replace(most=0)


class Bounding(NamedTuple):
    """A picture keeps its shape and stays one tile: it is made smaller if a side is too long, and
    stretched to whole squares (Pixtral, Agrawal et al. 2024)."""

    square: int
    """Pixels of a side of a square."""
    longest: int
    """Maximum pixels of a side, before the squares are filled."""

    @property
    def largest(self) -> int:
        """Maximum pixels of a side of the result."""
        return _multiple(self.longest, self.square)

    def small(self) -> Bounding:
        """Return the rule for a picture with little detail."""
        return self._replace(longest=min(self.longest, math.isqrt(SMALL)))


class Padding(NamedTuple):
    """A picture keeps its shape on the grid of square tiles that enlarges it least, or else reduces
    it least; what it leaves of the grid is black. With several tiles comes one more for the whole,
    stretched (Llama 4)."""

    tile: int
    """Pixels of a side of a tile."""
    most: int
    """Most tiles of a grid."""

    def small(self) -> Padding:
        """Return the rule for a picture with little detail: one tile."""
        return self._replace(most=1)


class Filming(NamedTuple):
    """The frames of a video keep their shape as with `Fitting`, but the bounds are those of all
    frames together (Qwen3-VL)."""

    square: int
    """Pixels of a side of a square."""
    least: int
    """Fewest pixels of all frames."""
    most: int
    together: int
    """Frames of a patch."""
    frames: int = 0
    """Frames of the video; 0: one patch has all."""

    @property
    def largest(self) -> int:
        """Bound on the pixels of a frame."""
        return Fitting(self.square, self.least, max(1, self.most // self.together)).largest

    def small(self) -> Filming:
        """Return the rule for frames with little detail: the same."""
        return self


Sizing = Tiling | Fitting | Matching | Reducing | Panning | Bounding | Padding | Filming
"""Rule by which a model's processor sizes pictures."""
_RULES: dict[str, Any] = {
    "tiling": Tiling, "fitting": Fitting, "matching": Matching, "reducing": Reducing,
    "panning": Panning, "bounding": Bounding, "padding": Padding, "filming": Filming,
}  # fmt: skip


def written(rule: Sizing) -> list[Any]:
    """Return a rule as JSON values."""
    name = next(name for name, kind in _RULES.items() if isinstance(rule, kind))
    return [name, *rule]


def read(given: Sequence[Any]) -> Sizing:
    """Return the rule that `written` wrote."""
    rule: Sizing = _RULES[given[0]](*given[1:])
    return rule


class Cut(NamedTuple):
    """Sizes (width, height) that a picture gets one after the other, and its tiles."""

    sizes: tuple[tuple[int, int], ...]
    tile: tuple[int, int]
    """Width and height of each tile; the picture may fill less of its tiles."""
    rows: int
    """0: the picture is one tile. Else the whole one, resized, is the last tile."""
    columns: int
    filter: Literal["lanczos", "bicubic", "bilinear"] = "lanczos"
    panned: bool = False
    """Whether the whole picture comes first, and the other tiles are parts of the original picture,
    the last of which may be smaller."""
    anew: bool = False
    """Whether the last tile is made from the original picture, not from the resized one."""

    @property
    def tiles(self) -> int:
        """Number of tiles, the whole picture's included."""
        return self.rows * self.columns + 1

    @property
    def pixels(self) -> int:
        """Pixels of all tiles."""
        return self.tiles * self.tile[0] * self.tile[1]


def cut(width: int, height: int, rule: Sizing) -> Cut:
    """Return the sizes and tiles of a picture of this size, in pixels. Raises `TooNarrow`."""
    if isinstance(rule, Fitting):
        size = _fitted(width, height, rule)
        return Cut((size,), size, 0, 0, "bicubic")
    if isinstance(rule, Filming):
        size = _filmed(width, height, rule)
        return Cut((size,), size, 0, 0, "bicubic")
    if isinstance(rule, Bounding):
        ratio = max(height / rule.longest, width / rule.longest, 1)
        sides = (max(1, math.floor(side / ratio)) for side in (width, height))
        wide, high = (_multiple(side, rule.square) for side in sides)
        return Cut(((wide, high),), (wide, high), 0, 0, "bicubic")
    if isinstance(rule, Matching):
        columns, rows = _matched(width, height, rule)
        tile, size = (rule.tile, rule.tile), (columns * rule.tile, rows * rule.tile)
        several = columns * rows > 1
        return Cut((size,), tile, *((rows, columns) if several else (0, 0)), "bicubic", anew=True)
    if isinstance(rule, Panning):
        tile, parts = (rule.tile, rule.tile), _panned(max(width, height), min(width, height), rule)
        grid = (1, parts) if width >= height else (parts, 1)
        return Cut((tile,), tile, *(grid if parts else (0, 0)), "bilinear", panned=True)
    if isinstance(rule, Padding):
        columns, rows = _padded(width, height, rule)
        tile, both = (rule.tile, rule.tile), (rows * rule.tile, columns * rule.tile)
        # A picture is not made larger than one tile, unless the tile is larger.
        high, wide = (
            min(max(side, rule.tile), most)
            for side, most in zip((height, width), both, strict=True)
        )
        if wide / width < high / height:
            high = min(math.floor(height * (wide / width)), high)
        else:
            wide = min(math.floor(width * (high / height)), wide)
        several = columns * rows > 1
        return Cut(
            ((max(wide, 1), max(high, 1)),),
            tile,
            *((rows, columns) if several else (0, 0)),
            "bilinear",
            anew=True,
        )
    if isinstance(rule, Reducing):
        scale = rule.longest / max(width, height)
        if scale >= 1.0:
            return Cut((), (width, height), 0, 0)
        size = max(1, round(scale * width)), max(1, round(scale * height))
        return Cut((size,), size, 0, 0, "bilinear")
    side = rule.tile
    first, tile = _below(*_scaled(width, height, rule.longest)), (side, side)
    if not rule.split:
        return Cut((first, tile), tile, 0, 0)
    width, height = first
    ratio = width / height
    if width >= height:
        width = _multiple(width, side)
        height = _multiple(int(width / ratio), side)
    else:
        height = _multiple(height, side)
        width = _multiple(int(height * ratio), side)
    if max(width, height) <= side:
        return Cut((first, (width, height)), tile, 0, 0)
    return Cut((first, (width, height)), tile, height // side, width // side)


def _fitted(width: int, height: int, rule: Fitting) -> tuple[int, int]:
    """Round both sides to squares; scale them if the picture is too small or too large then."""
    if max(width, height) > MOST_RATIO * min(width, height):
        raise TooNarrow
    side = rule.square
    wide, high = (round(each / side) * side for each in (width, height))
    if wide * high > rule.most:
        down = math.sqrt(height * width / rule.most)
        wide, high = (max(side, math.floor(one / down / side) * side) for one in (width, height))
    elif wide * high < rule.least:
        up = math.sqrt(rule.least / (height * width))
        wide, high = (math.ceil(one * up / side) * side for one in (width, height))
    return wide, high


def _filmed(width: int, height: int, rule: Filming) -> tuple[int, int]:
    """Round both sides to squares; scale them if all frames are too small or too large then."""
    side, frames = rule.square, max(rule.frames, rule.together)
    if min(width, height) < side:
        grown = max(side / height, side / width)
        width, height = int(width * grown), int(height * grown)
    if max(width, height) > MOST_RATIO * min(width, height):
        raise TooNarrow
    wide, high = (round(each / side) * side for each in (width, height))
    pixels = round(frames / rule.together) * rule.together * wide * high
    if pixels > rule.most:
        down = math.sqrt(frames * height * width / rule.most)
        wide, high = (max(side, math.floor(one / down / side) * side) for one in (width, height))
    elif pixels < rule.least:
        up = math.sqrt(rule.least / (frames * height * width))
        wide, high = (math.ceil(one * up / side) * side for one in (width, height))
    return wide, high


def _matched(width: int, height: int, rule: Matching) -> tuple[int, int]:
    """Return (columns, rows) of the grid with the nearest ratio. Of equal ones the last that the
    picture half fills, else the first; those of fewer tiles come first."""
    ratio, best, nearest = width / height, (1, 1), math.inf
    numbers = range(1, rule.most + 1)
    grids = [(c, r) for c in numbers for r in numbers if rule.least <= c * r <= rule.most]
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        far = abs(ratio - columns / rows)
        filled = width * height > 0.5 * rule.tile**2 * columns * rows
        if far < nearest or (far == nearest and filled):
            best, nearest = (columns, rows), far
    return best


def _padded(width: int, height: int, rule: Padding) -> tuple[int, int]:
    """Return (columns, rows) of the grid on which a picture grows least, or else shrinks least. Of
    equal ones the smallest; all is compared in fp32, as the processor does."""
    scales = {
        (columns, rows): min(single(columns * rule.tile / width), single(rows * rule.tile / height))
        for rows in range(1, rule.most + 1)
        for columns in range(1, rule.most // rows + 1)
    }
    larger = [scale for scale in scales.values() if scale >= 1]
    chosen = min(larger) if larger else max(scales.values())
    alike = [grid for grid, scale in scales.items() if scale == chosen]
    return min(alike, key=lambda grid: grid[0] * grid[1])


def _panned(long: int, short: int, rule: Panning) -> int:
    """Return the parts of a picture with these sides; 0: it is not cut."""
    if not rule.most or long / short < rule.ratio:
        return 0
    wish = min(long // rule.least, math.floor(long / short + 0.5))
    parts = min(rule.most, max(2, wish))
    return 0 if min(math.ceil(long / parts), short) < rule.least else parts


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

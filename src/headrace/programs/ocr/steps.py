"""Inputs of PP-OCR's programs, and their outputs as boxes, turns and texts.

A picture is [h, w, 3] in RGB; the programs take BGR from −1 to 1, [1, 3, h, w].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...base.errors import InvalidRequest
from .boxes import text_boxes
from .pixels import Codes, Floats, crop, crop_size, resized

LONGEST, SHORTEST = 2000, 30
"""Sides of a picture that is read as it is; others are scaled first."""
MOST_RATIO = 100
"""Longer side of a picture, relative to the shorter one."""
FLAT = 8
"""Width relative to height from which rows are added above and below, as for low pictures."""
DETECTED = 736
"""Shorter side of the detector's input, at least."""
GRID = 32
"""Both sides of the detector's input, and widths of the reader's, are multiples of it."""
HEIGHT, TURNED_WIDTH, LEAST_WIDTH, MOST_WIDTH = 48, 192, 320, 9600
"""Pixels of a line: its height, its width for the classifier, and for the reader."""
SURE, KEPT = 0.9, 0.5
"""Odds from which a line is taken as upside down, and mean odds from which a text is kept."""
TALL = 1.5
"""Height relative to width from which a line runs downwards."""
MOST_CROPPED = 4 * LONGEST**2
"""Pixels of all lines of a picture: boxes may overlap."""
_SCALED = (np.arange(256, dtype=np.float32) / 255 - np.float32(0.5)) / np.float32(0.5)


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line that was read."""

    text: str
    score: float
    """Mean odds of its characters."""
    box: tuple[tuple[float, float], ...]
    """Corners (x, y), clockwise from the upper left one, in pixels of the upright picture."""


@dataclass(frozen=True, slots=True)
class Page:
    """A picture as the detector and the crops take it."""

    pixels: Codes
    above: int
    """Rows that were added above."""
    scale: tuple[float, float]
    """Pixels of the file's picture for one of these, in x and y."""

    @classmethod
    def of(cls, pixels: Codes, width: int, height: int) -> Page:
        """Scale a picture of a file of this size. Raises `InvalidRequest` if one side is more than
        a hundred times the other."""
        if max(width, height) > MOST_RATIO * min(width, height):
            raise InvalidRequest(
                f"the picture has {width} by {height} pixels; the longer side may have at most "
                f"{MOST_RATIO} times those of the shorter one",
                param="image",
            )
        rows, columns = pixels.shape[:2]
        if min(rows, columns) < SHORTEST:
            pixels = resized(pixels, *_on_grid(columns, rows, SHORTEST / min(rows, columns)))
            rows, columns = pixels.shape[:2]
        scale, above, beside = (width / columns, height / rows), 0, 0
        if rows <= SHORTEST or columns > FLAT * rows:
            above = abs(2 * max(columns // FLAT, SHORTEST) - rows) // 2
        elif rows > FLAT * columns:  # Else the detector's picture would have no bound.
            beside = abs(2 * (rows // FLAT) - columns) // 2
        pixels = np.pad(pixels, ((above, above), (0, 2 * beside), (0, 0)))
        return cls(pixels, above, scale)

    @property
    def detected(self) -> tuple[int, int]:
        """Width and height of the detector's input."""
        rows, columns = self.pixels.shape[:2]
        return _on_grid(columns, rows, max(1.0, DETECTED / min(rows, columns)))

    def for_detector(self) -> Floats:
        """Return the detector's input."""
        return _input(resized(self.pixels, *self.detected))

    def boxes(self, odds: Floats) -> list[Floats]:
        """Return the boxes of lines in the detector's map [h, w], in reading order. Raises
        `InvalidRequest` if they overlap so much that they have too many pixels."""
        rows, columns = self.pixels.shape[:2]
        found = text_boxes(odds, columns, rows)
        area = sum(math.prod(crop_size(box)) for box in found)
        if area > MOST_CROPPED:
            raise InvalidRequest(
                f"the picture's {len(found)} lines overlap: they have {area:,} pixels in all, at "
                f"most {MOST_CROPPED:,} are read",
                param="image",
            )
        return found

    def line(self, box: Floats) -> Codes | None:
        """Cut out a line, turned if it runs downwards; None if the box is degenerate."""
        found = crop(self.pixels, box)
        if found is not None and runs_downwards(*found.shape[1::-1]):
            return np.rot90(found)
        return found

    def placed(self, box: Floats, width: int, height: int) -> tuple[tuple[float, float], ...]:
        """Return a box in the file's picture of this size."""
        found = (box - (0, self.above)) * self.scale
        return tuple(map(tuple, np.clip(found, 0, (width, height)).round(1).tolist()))


def _on_grid(width: int, height: int, scale: float) -> tuple[int, int]:
    sides = [max(GRID, round(int(side * scale) / GRID) * GRID) for side in (width, height)]
    return sides[0], sides[1]


def _input(pixels: Codes, width: int = 0) -> Floats:
    """Return pixels as a program takes them, with zeros on the right up to `width`."""
    found = np.zeros((1, 3, pixels.shape[0], max(width, pixels.shape[1])), np.float32)
    found[0, :, :, : pixels.shape[1]] = _SCALED[pixels[:, :, ::-1]].transpose(2, 0, 1)
    return found


def runs_downwards(width: int, height: int) -> bool:
    return height >= TALL * width


def line_width(width: int, height: int, most: int) -> int:
    """Return the width of a line that is scaled to the height of 48 pixels."""
    return min(most, math.ceil(HEIGHT * width / height))


def for_classifier(line: Codes) -> Floats:
    """Return the classifier's input."""
    width = line_width(line.shape[1], line.shape[0], TURNED_WIDTH)
    return _input(resized(line, width, HEIGHT), TURNED_WIDTH)


def upside_down(odds: Floats) -> bool:
    """Tell whether the classifier is sure that a line is. `odds` [2]: of upright, and of not."""
    return bool(odds[1] > max(odds[0], SURE))


def reader_width(box: Floats) -> int:
    """Return the width of the reader's input for a box: one of few, so that their prices are
    known."""
    width, height = crop_size(box)
    if runs_downwards(width, height):
        width, height = height, width
    return max(LEAST_WIDTH, -(-line_width(width, max(1, height), MOST_WIDTH) // GRID) * GRID)


def for_reader(line: Codes) -> Floats:
    """Return the reader's input."""
    width = line_width(line.shape[1], line.shape[0], MOST_WIDTH)
    return _input(resized(line, width, HEIGHT), max(LEAST_WIDTH, -(-width // GRID) * GRID))


def text_of(odds: Floats, characters: Sequence[str]) -> tuple[str, float]:
    """Return the text of the reader's odds [steps, characters] and the mean odds of its characters
    (connectionist temporal classification, Graves et al. 2006: the best one of each step,
    repetitions and blanks left out)."""
    best = odds.argmax(1)
    kept = (best != 0) & (np.diff(best, prepend=-1) != 0)
    if not kept.any():
        return "", 0.0
    text = "".join(characters[one] for one in best[kept].tolist())
    return text, float(odds.max(1)[kept].mean())

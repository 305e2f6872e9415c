"""Pixels: resampling, and crops along a tilted box."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
SHARPNESS = -0.75
"""Parameter of the cubic kernel (Keys 1981)."""
AT_ONCE = 1 << 16
"""Pixels of a crop that are computed together: each needs sixteen of its picture."""


def resized(pixels: Codes, width: int, height: int) -> Codes:
    """Resample a picture [h, w, 3] to [height, width, 3], linearly between pixel centres and
    without a filter."""
    if pixels.shape[:2] == (height, width):
        return pixels
    upper, lower, share = _between(pixels.shape[0], height)
    rows = pixels[upper] * (1 - share)[:, None, None] + pixels[lower] * share[:, None, None]
    left, right, share = _between(pixels.shape[1], width)
    found = rows[:, left] * (1 - share)[:, None] + rows[:, right] * share[:, None]
    return np.rint(found).astype(np.uint8)


def _between(size: int, wanted: int) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], Floats]:
    """Return, for each wanted position, its two neighbours and the second one's share."""
    places = np.clip((np.arange(wanted) + 0.5) * (size / wanted) - 0.5, 0, size - 1)
    first = places.astype(np.intp)
    return first, np.minimum(first + 1, size - 1), (places - first).astype(np.float32)


def crop_size(corners: Floats) -> tuple[int, int]:
    """Return width and height of a crop: the longer one of each pair of sides."""
    sides = np.linalg.norm(corners - np.roll(corners, -1, 0), axis=1)
    return int(max(sides[0], sides[2])), int(max(sides[1], sides[3]))


def crop(pixels: Codes, corners: Floats) -> Codes | None:
    """Cut out the quadrilateral of these corners [4, 2] (x, y; clockwise from the upper left one)
    as a rectangle, with cubic interpolation; None if it is degenerate."""
    width, height = crop_size(corners)
    if width < 1 or height < 1:
        return None
    try:
        mapping = _projection(width, height, corners.astype(np.float64))
    except np.linalg.LinAlgError:
        return None
    found = np.empty((height * width, 3), np.uint8)
    for first in range(0, len(found), AT_ONCE):
        places = np.arange(first, min(first + AT_ONCE, len(found)))
        v, u = np.divmod(places, width)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            x, y, scale = mapping @ np.stack([u, v, np.ones_like(u)])
            x, y = x / scale, y / scale
        found[places] = _cubic(pixels, x, y)
    return found.reshape(height, width, 3)


def _projection(
    width: int, height: int, corners: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the projective map [3, 3] of a rectangle's corners to these. Raises `LinAlgError` if
    three of them are on a line."""
    equations, values = [], []
    rectangle = ((0, 0), (width, 0), (width, height), (0, height))
    for (u, v), (x, y) in zip(rectangle, corners, strict=True):
        equations += [
            [u, v, 1, 0, 0, 0, -u * x, -v * x],
            [0, 0, 0, u, v, 1, -u * y, -v * y],
        ]
        values += [x, y]
    found = np.linalg.solve(np.array(equations, np.float64), np.array(values))
    return np.append(found, 1.0).reshape(3, 3)


def _cubic(pixels: Codes, x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> Codes:
    """Return the picture's values [n, 3] between its pixels; beyond its edge is the edge."""
    height, width = pixels.shape[:2]
    x, y = (np.clip(np.nan_to_num(one), -1.0, most) for one, most in ((x, width), (y, height)))
    left, top = np.floor(x).astype(np.intp), np.floor(y).astype(np.intp)
    across, down = _kernel(x - left), _kernel(y - top)
    found = np.zeros((len(x), 3), np.float32)
    for row in range(4):
        line = np.zeros_like(found)
        rows = np.clip(top + row - 1, 0, height - 1)
        for column in range(4):
            columns = np.clip(left + column - 1, 0, width - 1)
            line += across[column][:, None] * pixels[rows, columns]
        found += down[row][:, None] * line
    codes: Codes = np.rint(found.clip(0, 255)).astype(np.uint8)
    return codes


def _kernel(share: npt.NDArray[np.float64]) -> list[Floats]:
    """Return the weights of the four pixels around a place."""
    one, two = share + 1, 1 - share
    a = SHARPNESS
    first = ((a * one - 5 * a) * one + 8 * a) * one - 4 * a
    second = ((a + 2) * share - (a + 3)) * share * share + 1
    third = ((a + 2) * two - (a + 3)) * two * two + 1
    weights = [first, second, third, 1 - first - second - third]
    return [each.astype(np.float32) for each in weights]

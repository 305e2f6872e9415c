"""Decoding of a picture's bytes to tiles, in one confined child process per file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest
from ..base.tiling import Sizing, TooNarrow, cut, written
from .confined import OnChild, check_size, decoded, memory_file

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
PICTURE_REFUSALS = {
    "format": "the file is not a picture of a known format; jpeg, png, webp, bmp and gif are taken",
    "damaged": "the picture cannot be decoded",
    "empty": "the picture has no pixels",
    "large": "the picture has more pixels than are taken here",
    "narrow": "one side of the picture is more than 200 times as long as the other",
    "tiles": "the picture is cut into more tiles, or larger ones, than there is room for",
    "time": "the picture took too long to decode",
    "room": "the server has no room for the pixels",
    "lost": "the picture cannot be decoded within the limits of memory and time",
}
"""Code from the child → clause for the user. A decoder's own words are never shown."""
_SIGNATURES = {
    b"\xff\xd8\xff": "jpeg",
    b"\x89PNG\r\n\x1a\n": "png",
    b"BM": "bmp",
    b"GIF87a": "gif",
    b"GIF89a": "gif",
}


@dataclass(frozen=True, slots=True)
class PictureLimits:
    """Limits on one file. A request may lower them, never raise them."""

    bytes: int = 20 << 20
    """Size of the file."""
    pixels: int = 50_000_000
    """Width times height, both declared and decoded."""
    side: int = 1 << 16
    """Longest side in pixels."""
    tiles: int = 1 << 10
    """Tiles of the result, the whole picture's included."""
    resized: int = 1 << 28
    """Pixels of all tiles."""
    memory: int = 3 << 29
    """Bytes of address space of the child."""
    wall_seconds: float = 120.0
    """Time from the start of the child until it is killed."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded, resized and split picture."""

    tiles: Codes
    """[tiles, height, width, 3] in RGB: row by row, then the whole picture's."""
    rows: int
    """0: the whole picture's tile alone."""
    columns: int
    format: str
    width: int
    """Pixels of the file's picture, turned as its EXIF says."""
    height: int


def picture_format(data: bytes) -> str | None:
    """Detect the format by its signature: jpeg, png, webp, bmp, gif; else None."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((name for head, name in _SIGNATURES.items() if data.startswith(head)), None)


def decode_picture(
    data: bytes,
    rule: Sizing,
    limits: PictureLimits = PictureLimits(),
    param: str = "file",
    on_child: OnChild | None = None,
) -> Picture:
    """Decode the first frame of a picture and cut it into tiles.

    `param`: the field that errors name. `on_child` gets the child as soon as it exists. Blocks
    until decoding ends: call it in a thread. Raises `InvalidRequest` if the file is no picture, is
    damaged or has too many pixels or tiles, and `TooLarge` if it has too many bytes. Raises
    `PackageAbsent` without Pillow, and `Overloaded` if there is no memory for the result.
    """
    check_size(data, limits.bytes, param)
    format = picture_format(bytes(data[:12]))
    if format is None:
        raise InvalidRequest(PICTURE_REFUSALS["format"], param=param)
    order = {
        "format": format,
        "rule": written(rule),
        "pixels": limits.pixels,
        "side": limits.side,
        "tiles": limits.tiles,
        "resized": limits.resized,
        "memory": limits.memory,
        "result": 3 * limits.resized,
    }
    believable = partial(_believable, limits=limits, rule=rule)
    words = PICTURE_REFUSALS, ("reading pictures needs", "pictures"), param, on_child
    with memory_file("tiles") as target:
        answer = decoded(
            "picture_child", data, order, target, limits.wall_seconds, believable, *words
        )
        found = cut(answer["width"], answer["height"], rule)
        tiles = np.empty((found.tiles, *found.tile[::-1], 3), np.uint8)
        if os.preadv(target.fileno(), [tiles.data.cast("B")], 0) != tiles.nbytes:
            raise InvalidRequest(PICTURE_REFUSALS["lost"], param=param)
    numbers = answer["rows"], answer["columns"], format, answer["width"], answer["height"]
    return Picture(tiles, *numbers)


def _brief(numbers: Floats) -> Floats:
    """Round to bfloat16, ties to even."""
    bits = numbers.astype(np.float32).view(np.uint32)
    rounded: Floats = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    return rounded


def levels(
    scale: float, mean: Sequence[float], deviation: Sequence[float], *, brief: bool = False
) -> Floats:
    """Return what a model gets for each byte of each channel [3, 256]: rescaled in fp64, normalised
    in fp32, as transformers does both. `brief`: each step is rounded to bfloat16."""
    scaled = (np.arange(256, dtype=np.float64) * scale).astype(np.float32)
    means, deviations = (np.array(one, np.float32)[:, None] for one in (mean, deviation))
    if brief:
        scaled = _brief(np.arange(256, dtype=np.float32) * np.float32(scale))
        return _brief(_brief(scaled - _brief(means)) / _brief(deviations))
    normalised: Floats = (scaled - means) / deviations
    return normalised


def _believable(answer: dict[str, Any], limits: PictureLimits, rule: Sizing) -> bool:
    names = "rows", "columns", "width", "height"
    numbers = [answer.get(name) for name in names]
    if not all(type(one) is int and 0 <= one <= limits.side for one in numbers):
        return False
    rows, columns, width, height = (int(answer[name]) for name in names)
    try:
        found = cut(width, height, rule) if width and height else None
    except TooNarrow:
        return False
    if found is None or (found.rows, found.columns) != (rows, columns):
        return False
    return found.tiles <= limits.tiles and found.pixels <= limits.resized

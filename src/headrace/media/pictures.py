"""Decoding of a picture's bytes to tiles or in one piece, in one confined child process per
file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest, Overloaded, TooLarge
from ..base.extras import absent
from ..base.tiling import Tiling
from .confined import OnChild, memory_file, run_child

Codes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
PICTURE_REFUSALS = {
    "format": "the file is not a picture of a known format; jpeg, png, webp, bmp and gif are taken",
    "damaged": "the picture cannot be decoded",
    "empty": "the picture has no pixels",
    "large": "the picture has more pixels than are taken here",
    "tiles": "the picture is cut into more tiles than there is room for",
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
    memory: int = 3 << 29
    """Bytes of address space of the child."""
    wall_seconds: float = 120.0
    """Time from the start of the child until it is killed."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded, resized and split picture."""

    tiles: Codes
    """[tiles, side, side, 3] in RGB: row by row, then the whole picture's."""
    rows: int
    """0: the whole picture's tile alone."""
    columns: int
    format: str
    width: int
    """Pixels of the file's picture, turned as its EXIF says."""
    height: int


@dataclass(frozen=True, slots=True)
class UncutPicture:
    """A decoded picture in one piece."""

    pixels: Codes
    """[height, width, 3] in RGB; smaller than the file's picture if that was too large."""
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
    tiling: Tiling,
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
    most = limits.tiles
    order = {"tiling": tiling, "tiles": most, "result": most * 3 * tiling.tile**2}
    shape = partial(_of_tiles, tiling.tile, most)
    answer, tiles = _decoded(data, order, shape, limits, param, on_child)
    return Picture(tiles, answer["rows"], answer["columns"], *_about(answer))


def decode_uncut(
    data: bytes,
    longest: int,
    limits: PictureLimits = PictureLimits(),
    param: str = "file",
    on_child: OnChild | None = None,
) -> UncutPicture:
    """Decode the first frame of a picture, reduced if a side is longer than `longest`. Blocks and
    raises as `decode_picture`."""
    order = {"longest": longest, "result": 3 * longest**2}
    answer, pixels = _decoded(data, order, partial(_of_one, longest), limits, param, on_child)
    return UncutPicture(pixels, *_about(answer))


Shaped = Callable[[int, int], tuple[int, ...] | None]
"""Shape of the pixels by the rows and columns of an answer; None if no child can answer so."""


def _of_tiles(side: int, most: int, rows: int, columns: int) -> tuple[int, ...] | None:
    fits = bool(rows) == bool(columns) and rows * columns < most
    return (rows * columns + 1, side, side, 3) if fits else None


def _of_one(longest: int, rows: int, columns: int) -> tuple[int, ...] | None:
    return (rows, columns, 3) if 0 < rows <= longest and 0 < columns <= longest else None


def _decoded(
    data: bytes,
    form: Mapping[str, Any],
    shape: Shaped,
    limits: PictureLimits,
    param: str,
    on_child: OnChild | None,
) -> tuple[dict[str, Any], Codes]:
    """Have a child decode a file; return its answer and the pixels."""
    if len(data) > limits.bytes:
        raise TooLarge(
            f"the file has {len(data):,} bytes, at most {limits.bytes:,} are taken", param=param
        )
    format = picture_format(bytes(data[:12]))
    if format is None:
        raise InvalidRequest(PICTURE_REFUSALS["format"], param=param)
    bounds = {"pixels": limits.pixels, "side": limits.side, "memory": limits.memory}
    order = {"format": format, **bounds, **form}
    with memory_file("picture") as source, memory_file("pixels") as target:
        source.write(data)
        source.flush()
        os.lseek(source.fileno(), 0, os.SEEK_SET)
        answer = run_child("picture_child", order, source, target, limits.wall_seconds, on_child)
        if not _believable(answer, limits, shape):
            answer = {"refused": "lost"}
        if "absent" in answer:
            raise absent("reading pictures needs", "pillow", "pictures")
        if answer.get("refused") == "room":
            raise Overloaded(PICTURE_REFUSALS["room"], retry_after=5.0)
        if "refused" in answer:
            raise InvalidRequest(PICTURE_REFUSALS[answer["refused"]], param=param)
        pixels = np.empty(shape(answer["rows"], answer["columns"]) or 0, np.uint8)
        if os.preadv(target.fileno(), [pixels.data.cast("B")], 0) != pixels.nbytes:
            raise InvalidRequest(PICTURE_REFUSALS["lost"], param=param)
    return {**answer, "format": format}, pixels


def _about(answer: dict[str, Any]) -> tuple[str, int, int]:
    return answer["format"], answer["width"], answer["height"]


def levels(scale: float, mean: Sequence[float], deviation: Sequence[float]) -> Floats:
    """Return what a model gets for each byte of each channel [3, 256]: rescaled in fp64, normalised
    in fp32, as transformers does both."""
    scaled = (np.arange(256, dtype=np.float64) * scale).astype(np.float32)
    means, deviations = (np.array(one, np.float32)[:, None] for one in (mean, deviation))
    normalised: Floats = (scaled - means) / deviations
    return normalised


def _believable(answer: Any, limits: PictureLimits, shape: Shaped) -> bool:
    """Check that the answer has one of the three known forms: a compromised child may send
    anything."""
    if not isinstance(answer, dict):
        return False
    if "rows" in answer:
        numbers = [answer.get(name) for name in ("rows", "columns", "width", "height")]
        if not all(type(one) is int and 0 <= one <= limits.side for one in numbers):
            return False
        return shape(answer["rows"], answer["columns"]) is not None
    return answer.get("refused") in PICTURE_REFUSALS or isinstance(answer.get("absent"), str)

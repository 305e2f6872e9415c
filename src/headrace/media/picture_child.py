"""Child process that decodes a picture: `python -m headrace.media.picture_child` for one file.

It writes tiles: rows of pixels in RGB, a byte each. The picture's size is read from its header and
checked before anything of it is decoded.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ..base.tiling import Cut, TooNarrow, cut, read
from .decoder import FileRefused, run_decoder, writing

PLUGINS = {
    "jpeg": ("Jpeg", "Mpo"),
    "png": ("Png",),
    "webp": ("WebP",),
    "bmp": ("Bmp",),
    "gif": ("Gif",),
}
"""Format → Pillow's modules that read it; its own name of the format is the first one's."""
_LAZY = ("ImageFile", "ImageOps", "ImagePalette", "ImageColor", "ImageChops", "TiffImagePlugin")
"""Modules that Pillow imports only when a file needs them."""


def imported(format: str) -> Any:
    """Import Pillow's readers of a format; return `PIL.Image`. Raises `ImportError`."""
    pillow = import_module("PIL.Image")
    for name in (*_LAZY, *(f"{plugin}ImagePlugin" for plugin in PLUGINS[format])):
        import_module(f"PIL.{name}")
    return pillow


def decode(order: dict[str, Any], pillow: Any) -> dict[str, Any]:
    """Write the tiles of a picture."""
    data = os.fdopen(0, "rb", buffering=0, closefd=False).readall()
    rule, pixels = read(order["rule"]), int(order["pixels"])
    pillow.MAX_IMAGE_PIXELS = pixels
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A frame may be larger than its file's header says: then Pillow itself would warn.
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            name = PLUGINS[order["format"]][0].upper()
            picture = pillow.open(io.BytesIO(data), formats=(name,))
            width, height = picture.size
            if not width or not height:
                raise FileRefused("empty")
            if width * height > pixels or max(width, height) > order["side"]:
                raise FileRefused("large")
            try:
                both = cut(width, height, rule), cut(height, width, rule)
            except TooNarrow:
                raise FileRefused("narrow") from None
            if all(_too_large(one, order) for one in both):
                raise FileRefused("tiles")
            # The orientation of a PNG may come after its pixels: now it is decoded.
            turned = picture.getexif().get(_ORIENTATION, 1) in _SIDEWAYS
            found = both[turned]
            if _too_large(found, order):
                raise FileRefused("tiles")
            picture = upright(picture, pillow)
        except (pillow.DecompressionBombWarning, pillow.DecompressionBombError):
            raise FileRefused("large") from None
    if picture.size != ((height, width) if turned else (width, height)):
        raise FileRefused("damaged")
    with writing(), os.fdopen(order["into"], "wb", closefd=False) as target:
        for each in tiles_of(picture, found, pillow):
            target.write(each.tobytes())
    grid = {"rows": found.rows, "columns": found.columns}
    return {**grid, "width": picture.width, "height": picture.height}


def _too_large(found: Cut, order: dict[str, Any]) -> bool:
    return bool(found.tiles > order["tiles"] or found.pixels > order["resized"])


_ORIENTATION, _SIDEWAYS = 0x0112, (5, 6, 7, 8)


def upright(picture: Any, pillow: Any) -> Any:
    """Decode a picture's first frame: turned as its EXIF says, in RGB, on white where it is
    transparent."""
    turned = import_module("PIL.ImageOps").exif_transpose(picture)
    if turned.mode.startswith("I"):
        # Grey of 16 bits: the high byte, as Pillow has it for colours. Its own conversion of grey
        # makes all but the darkest 256 levels white. One of them may be named as transparent: that
        # is left out.
        turned.info.pop("transparency", None)
        return (
            turned.convert("I").point(lambda level: level * (1 / 256)).convert("L").convert("RGB")
        )
    if "A" in turned.getbands() or turned.info.get("transparency") is not None:
        turned = turned.convert("RGBA")
        white = pillow.new("RGBA", turned.size, (255, 255, 255, 255))
        return pillow.alpha_composite(white, turned).convert("RGB")
    return turned.convert("RGB")


def tiles_of(picture: Any, found: Cut, pillow: Any) -> Iterator[Any]:
    """Yield the tiles of a picture in RGB, row by row, then the whole one; or this first."""
    resample, (wide, high) = pillow.Resampling[found.filter.upper()], found.tile
    if found.panned:
        yield picture.resize(found.tile, resample=resample)
        yield from (
            part.resize(found.tile, resample=resample)
            for part in _parts(picture, found.rows, found.columns)
        )
        return
    came = picture
    for size in found.sizes:
        picture = picture.resize(size, resample=resample)
    if not found.rows:
        # What lies outside of a picture is black.
        filled = picture.size == found.tile
        yield picture if filled else picture.crop((0, 0, wide, high))
        return
    for row in range(found.rows):
        for column in range(found.columns):
            left, above = column * wide, row * high
            yield picture.crop((left, above, left + wide, above + high))
    yield (came if found.anew else picture).resize(found.tile, resample=resample)


def _parts(picture: Any, rows: int, columns: int) -> Iterator[Any]:
    """Yield the parts of a picture, row by row; the last of a row or a column may be smaller."""
    if not rows:
        return
    wide, high = -(-picture.width // columns), -(-picture.height // rows)
    for above in range(0, high * rows, high):
        for left in range(0, wide * columns, wide):
            right, below = min(left + wide, picture.width), min(above + high, picture.height)
            yield picture.crop((left, above, right, below))


if __name__ == "__main__":
    run_decoder(imported, decode)

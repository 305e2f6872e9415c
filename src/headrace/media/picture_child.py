"""Child process that decodes a picture: `python -m headrace.media.picture_child` for one file.

It reads the file from standard input and writes tiles, or the picture in one piece, to the
descriptor named in its order: rows of pixels in RGB, a byte each. After importing Pillow it gives
up what could do harm, as `child` does. The picture's size is read from its header and checked
before anything of it is decoded.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ..base.tiling import Cut, Tiling, cut
from .seccomp import confine

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


class PictureRefused(Exception):
    """Refusal by the decoder; its text is a key of `pictures.PICTURE_REFUSALS`."""


def main() -> None:
    """Decode standard input as ordered by the only argument, a JSON object."""
    order = json.loads(sys.argv[1])
    try:
        pillow = imported(order["format"])
    except ImportError as absent:
        _say({"absent": absent.name})
        return
    obey(order, pillow)


def imported(format: str) -> Any:
    """Import Pillow's readers of a format; return `PIL.Image`. Raises `ImportError`."""
    pillow = import_module("PIL.Image")
    for name in (*_LAZY, *(f"{plugin}ImagePlugin" for plugin in PLUGINS[format])):
        import_module(f"PIL.{name}")
    return pillow


def obey(order: dict[str, Any], pillow: Any) -> None:
    """Confine this process for good, decode, and print the result."""
    data = os.fdopen(0, "rb", buffering=0, closefd=False).readall()
    confine(order["memory"], order["processor_seconds"], order["result"])
    try:
        _say(_decode(order, pillow, data))
    except PictureRefused as refused:
        _say({"refused": str(refused)})
    except MemoryError:
        _say({"refused": "lost"})
    except Exception:  # noqa: BLE001 - whatever a decoder raises is the file's fault
        _say({"refused": "damaged"})


def _decode(order: dict[str, Any], pillow: Any, data: bytes) -> dict[str, Any]:
    """Decode a picture and write its pixels as ordered: cut into tiles, or in one piece."""
    tiling = Tiling(*order["tiling"]) if "tiling" in order else None
    picture, found = _opened(order, pillow, data, tiling)
    if tiling is not None:
        assert found is not None, "it was cut"
        grid = {"rows": found.rows, "columns": found.columns}
        pieces = tiles_of(picture, found, tiling, pillow)
    else:
        piece = reduced(picture, order["longest"], pillow)
        grid, pieces = {"rows": piece.height, "columns": piece.width}, iter([piece])
    try:
        with os.fdopen(order["into"], "wb", closefd=False) as target:
            for each in pieces:
                target.write(each.tobytes())
    except OSError as error:
        raise PictureRefused("room" if error.errno == errno.ENOSPC else "lost") from error
    return {**grid, "width": picture.width, "height": picture.height}


def _opened(
    order: dict[str, Any], pillow: Any, data: bytes, tiling: Tiling | None
) -> tuple[Any, Cut | None]:
    """Return the upright picture and how it is cut; both are checked before it is decoded."""
    pixels = int(order["pixels"])
    pillow.MAX_IMAGE_PIXELS = pixels
    found = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # A frame may be larger than its file's header says: then Pillow itself would warn.
        warnings.simplefilter("error", pillow.DecompressionBombWarning)
        try:
            name = PLUGINS[order["format"]][0].upper()
            picture = pillow.open(io.BytesIO(data), formats=(name,))
            width, height = picture.size
            if not width or not height:
                raise PictureRefused("empty")
            if width * height > pixels or max(width, height) > order["side"]:
                raise PictureRefused("large")
            both = (
                [] if tiling is None else [cut(width, height, tiling), cut(height, width, tiling)]
            )
            if min((one.tiles for one in both), default=0) > order.get("tiles", 0):
                raise PictureRefused("tiles")
            # The orientation of a PNG may come after its pixels: now it is decoded.
            turned = picture.getexif().get(_ORIENTATION, 1) in _SIDEWAYS
            if both:
                found = both[turned]
                if found.tiles > order["tiles"]:
                    raise PictureRefused("tiles")
            picture = upright(picture, pillow)
        except (pillow.DecompressionBombWarning, pillow.DecompressionBombError):
            raise PictureRefused("large") from None
    if picture.size != ((height, width) if turned else (width, height)):
        raise PictureRefused("damaged")
    return picture, found


def reduced(picture: Any, longest: int, pillow: Any) -> Any:
    """Return a picture whose longer side has at most `longest` pixels, each the mean of what it
    covers."""
    scale = longest / max(picture.size)
    if scale >= 1.0:
        return picture
    size = [max(1, round(scale * side)) for side in picture.size]
    return picture.resize(size, resample=pillow.Resampling.BILINEAR)


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


def tiles_of(picture: Any, found: Cut, tiling: Tiling, pillow: Any) -> Iterator[Any]:
    """Yield the tiles of a picture in RGB, row by row, then the whole one."""
    lanczos, side = pillow.Resampling.LANCZOS, tiling.tile
    whole = picture.resize(found.first, resample=lanczos).resize(found.second, resample=lanczos)
    if not found.rows:
        yield whole
        return
    for row in range(found.rows):
        for column in range(found.columns):
            corner = column * side, row * side
            yield whole.crop((*corner, corner[0] + side, corner[1] + side))
    yield whole.resize((side, side), resample=lanczos)


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

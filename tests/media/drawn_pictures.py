"""Pictures that are drawn, in every format and mode, and what the child makes of them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from headrace.base.tiling import Sizing, cut
from headrace.media import picture_child as child

MEAN, DEVIATION = (0.5, 0.4, 0.3), (0.5, 0.25, 0.7)


FORMATS = (
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "P", {}),
    ("PNG", "P", {"transparency": 3}),
    ("PNG", "L", {}),
    ("PNG", "LA", {}),
    ("PNG", "1", {}),
    ("JPEG", "RGB", {"quality": 80}),
    ("JPEG", "L", {}),
    ("JPEG", "CMYK", {}),
    ("JPEG", "RGB", {"progressive": True}),
    ("WEBP", "RGB", {"lossless": True}),
    ("WEBP", "RGBA", {}),
    ("BMP", "RGB", {}),
    ("BMP", "P", {}),
    ("GIF", "P", {}),
)


def drawn(draw: np.random.Generator, width: int, height: int, mode: str) -> Image.Image:
    """A picture of noise over large areas, so that every filter has something to do."""
    coarse = draw.integers(0, 256, (-(-height // 7), -(-width // 7), 4)).repeat(7, 0).repeat(7, 1)
    noise = coarse[:height, :width] + draw.integers(-9, 10, (height, width, 4))
    picture = Image.fromarray(noise.clip(0, 255).astype(np.uint8), "RGBA")
    return picture if mode == "RGBA" else picture.convert("RGB").convert(mode)


def encoded(picture: Image.Image, format: str, **more: Any) -> bytes:
    room = io.BytesIO()
    picture.save(room, format, **more)
    return room.getvalue()


def ours(data: bytes, rule: Sizing) -> tuple[np.ndarray[Any, Any], int, int]:
    """What the child does, in this process: (tiles, rows, columns)."""
    picture = Image.open(io.BytesIO(data))
    picture = child.upright(picture, Image)
    found = cut(*picture.size, rule)
    tiles = [np.array(tile) for tile in child.tiles_of(picture, found, Image)]
    return np.stack(tiles), found.rows, found.columns

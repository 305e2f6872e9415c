"""Pictures that keep their shape, or take the nearest grid's: pixels as transformers has them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra pictures")
from drawn_pictures import DEVIATION, FORMATS, MEAN, drawn, encoded, ours
from PIL import Image, ImageOps
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from headrace.base.errors import InvalidRequest
from headrace.base.tiling import Bounding, Fitting, Matching, Padding, Panning, TooNarrow, cut
from headrace.media import PICTURE_REFUSALS, PictureLimits, decode_picture, levels
from headrace.media import picture_child as child
from tiny.llama4_chat import processed

SMALL = Fitting(square=8, least=192, most=3_000)
TILED = ((1, 1), (1, 900), (900, 1), (16, 16), (32, 16), (16, 48), (33, 17), (64, 48))
ODD = ((1, 1), (1, 2), (2, 1), (1, 200), (200, 1), (33, 1), (8, 8), (64, 46), (600, 3))


def fitted(tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[patches, 3 · 4²] of the one tile, square by square, in fp32."""
    (tile,) = tiles
    rows, columns = (side // 8 for side in tile.shape[:2])
    cells = tile.reshape(rows, 2, 4, columns, 2, 4, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    table = levels(1 / 255, MEAN, DEVIATION)
    return np.stack([table[at][cells[:, :, :, :, at]] for at in range(3)], 4).reshape(-1, 48)


def check(data: bytes, rule: Fitting, tiles: np.ndarray[Any, Any]) -> None:
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": rule.least, "longest_edge": rule.most},
        patch_size=4,
        image_mean=list(MEAN),
        image_std=list(DEVIATION),
    )
    opened = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    wanted = processor([opened], return_tensors="np")
    assert wanted["image_grid_thw"].tolist() == [[1, *(side // 4 for side in tiles.shape[1:3])]]
    frames = wanted["pixel_values"].reshape(-1, 3, 2, 16)
    assert frames.dtype == np.float32
    for frame in range(2):
        assert np.array_equal(fitted(tiles), frames[:, :, frame].reshape(-1, 48))


def test_pixels_of_two_hundred_pictures_are_those_of_transformers() -> None:
    draw = np.random.default_rng(39)
    for at in range(200):
        format, mode, more = FORMATS[at % len(FORMATS)]
        width, height = ODD[at] if at < len(ODD) else map(int, draw.integers(1, 200, 2))
        more = dict(more)
        if format in ("JPEG", "PNG", "WEBP") and at % 3 == 0:
            exif = Image.Exif()
            exif[0x0112] = int(draw.integers(1, 9))
            more["exif"] = exif
        data = encoded(drawn(draw, width, height, mode), format, **more)
        rule = SMALL._replace(
            least=(64, 192, 700)[at % 3], most=(800, 3_000, 20_000, 1 << 20)[at % 4]
        )
        check(data, rule, ours(data, rule)[0])


@pytest.mark.parametrize("size", [(777, 1_033), (4_000, 21), (9, 1_700)])
def test_real_sizes_through_the_confined_child(size: tuple[int, int]) -> None:
    data = encoded(drawn(np.random.default_rng(1), *size, "RGB"), "PNG")
    rule = Fitting(8, 56 * 56, 28 * 28 * 256)
    made = decode_picture(data, rule)
    assert (made.rows, made.columns, made.width, made.height) == (0, 0, *size)
    check(data, rule, made.tiles)


def test_sizes_are_those_of_transformers() -> None:
    draw, refused = np.random.default_rng(3), 0
    for _ in range(5_000):
        width, height = map(int, 10 ** draw.uniform(0, 4.2, 2))
        square = int(draw.choice([8, 28, 32]))
        rule = Fitting(
            square, int(draw.integers(1, 9)) * square**2, int(10 ** draw.uniform(4.2, 7))
        )
        given = {"factor": square, "min_pixels": rule.least, "max_pixels": rule.most}
        try:
            wanted = smart_resize(height, width, **given)
        except ValueError:
            refused += 1
            with pytest.raises(TooNarrow):
                cut(width, height, rule)
            continue
        found = cut(width, height, rule)
        assert found.tile == wanted[::-1]
        assert found.tiles == 1
        assert found.pixels <= rule.largest
        assert cut(width, height, rule.small()).pixels <= rule.small().largest
    assert 10 < refused < 2_500


@pytest.mark.parametrize(
    ("size", "limits", "why"),
    [
        ((201, 1), PictureLimits(), "narrow"),
        ((1, 30_000), PictureLimits(), "narrow"),
        ((100, 100), PictureLimits(resized=2_000), "tiles"),
    ],
)
def test_what_is_refused(size: tuple[int, int], limits: PictureLimits, why: str) -> None:
    data = encoded(Image.new("RGB", size), "PNG")
    with pytest.raises(InvalidRequest, match=PICTURE_REFUSALS[why]):
        decode_picture(data, SMALL, limits)


def test_tiles_of_the_nearest_shape_are_those_of_transformers() -> None:
    draw = np.random.default_rng(40)
    for at in range(200):
        format, mode, more = FORMATS[at % len(FORMATS)]
        width, height = TILED[at] if at < len(TILED) else map(int, draw.integers(1, 200, 2))
        data = encoded(drawn(draw, width, height, mode), format, **more)
        least = (1, 1, 1, 3)[at % 4]
        rule = Matching(16, least, (12, 1, 5, 6)[at % 4])
        tiles, rows, columns = ours(data, rule)
        processor = GotOcr2ImageProcessorPil(
            size={"height": 16, "width": 16},
            crop_to_patches=True,
            min_patches=rule.least,
            max_patches=rule.most,
            image_mean=list(MEAN),
            image_std=list(DEVIATION),
        )
        opened = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        wanted = processor([opened], return_tensors="np")["pixel_values"]
        assert len(wanted) == len(tiles) == rows * columns + 1
        table = levels(1 / 255, MEAN, DEVIATION)
        assert np.array_equal(
            np.stack([table[one][tiles[..., one]] for one in range(3)], 1), wanted
        )


def check_tiles(tiles: np.ndarray[Any, Any], wanted: Any) -> None:
    """Whether tiles in bytes become these pixels [tiles, 3, height, width]."""
    table = levels(1 / 255, MEAN, DEVIATION)
    made = np.stack([table[one][tiles[..., one]] for one in range(3)], 1)
    assert len(made) == len(wanted)
    assert np.array_equal(made, wanted)


def test_long_pictures_and_their_parts_are_those_of_transformers() -> None:
    draw, cut_into = np.random.default_rng(41), set()
    for at in range(200):
        format, mode, more = FORMATS[at % len(FORMATS)]
        width, height = TILED[at] if at < len(TILED) else map(int, draw.integers(1, 200, 2))
        data = encoded(drawn(draw, width, height, mode), format, **more)
        rule = Panning(16, (0, 4, 1, 9)[at % 4], (16, 17, 40)[at % 3], (1.0, 1.2, 2.5)[at % 3])
        tiles, rows, columns = ours(data, rule)
        processor = Gemma3ImageProcessorPil(
            size={"height": 16, "width": 16},
            do_pan_and_scan=rule.most > 0,
            pan_and_scan_max_num_crops=rule.most,
            pan_and_scan_min_crop_size=rule.least,
            pan_and_scan_min_ratio_to_activate=rule.ratio,
            image_mean=list(MEAN),
            image_std=list(DEVIATION),
        )
        opened = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        wanted = processor([opened], return_tensors="np")
        assert wanted["num_crops"].tolist() == [rows * columns]
        check_tiles(tiles, wanted["pixel_values"])
        cut_into.add(rows * columns)
    assert cut_into >= {0, 1, 2, 3, 4}


def test_pictures_within_bounds_are_those_of_transformers() -> None:
    draw = np.random.default_rng(42)
    for at in range(200):
        format, mode, more = FORMATS[at % len(FORMATS)]
        width, height = TILED[at] if at < len(TILED) else map(int, draw.integers(1, 200, 2))
        data = encoded(drawn(draw, width, height, mode), format, **more)
        rule = Bounding((8, 14, 28)[at % 3], (60, 16, 151, 400)[at % 4])
        processor = PixtralImageProcessorPil(
            size={"longest_edge": rule.longest},
            patch_size={"height": rule.square, "width": rule.square},
            image_mean=list(MEAN),
            image_std=list(DEVIATION),
        )
        opened = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        tiles = ours(data, rule)[0]
        assert max(tiles.shape[1:3]) <= rule.largest
        if min(width, height) * rule.longest < max(width, height):
            continue  # A side would have no pixels: there the reference fails.
        check_tiles(tiles, processor([opened], return_tensors="np")["pixel_values"])


@pytest.mark.parametrize("rule", [Panning(896, 4, 256, 1.2), Bounding(28, 1_540)])
def test_pictures_of_one_pixel_a_side_keep_their_tiles(rule: Panning | Bounding) -> None:
    for size in ((1, 1), (1, 5_000), (5_000, 1), (30_000, 2)):
        made = decode_picture(encoded(Image.new("RGB", size), "PNG"), rule)
        assert made.tiles.shape[1:3] == cut(*size, rule).tile[::-1]
        assert (made.width, made.height) == size


def test_padded_pictures_and_their_tiles_are_those_of_transformers() -> None:
    """Llama 4's processor, resized by Pillow: grids, black beyond the picture, bfloat16."""
    draw, grids = np.random.default_rng(43), set()
    table = levels(1 / 255, [0.5] * 3, [0.5] * 3, brief=True)
    for at in range(200):
        format, mode, more = FORMATS[at % len(FORMATS)]
        width, height = TILED[at] if at < len(TILED) else map(int, draw.integers(1, 200, 2))
        data = encoded(drawn(draw, width, height, mode), format, **more)
        rule = Padding(16, (16, 1, 5, 12)[at % 4])
        tiles, rows, columns = ours(data, rule)
        opened = child.upright(Image.open(io.BytesIO(data)), Image)
        wanted, grid = processed(opened, rule.most, 16)
        assert grid == (max(rows, 1), max(columns, 1))
        made = np.stack([table[one][tiles[..., one]] for one in range(3)], 1)
        assert np.array_equal(made, wanted.float().numpy())
        grids.add(grid)
    assert len(grids) > 12

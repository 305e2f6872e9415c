"""Pictures in: pixels as transformers' processor has them, and what each limit refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra pictures")
from drawn_pictures import DEVIATION, FORMATS, MEAN, drawn, encoded, ours
from PIL import Image, ImageOps
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)

from headrace.base.errors import HeadraceError, InvalidRequest, TooLarge
from headrace.base.tiling import Reducing, Tiling, cut
from headrace.media import PICTURE_REFUSALS, PictureLimits, decode_picture, levels
from headrace.media.confined import checked, run_child
from headrace.media.pictures import _believable, picture_format

SMALL = Tiling(longest=96, tile=32, split=True)


def processor(tiling: Tiling) -> Any:
    return Idefics3ImageProcessorPil(
        size={"longest_edge": tiling.longest},
        max_image_size={"longest_edge": tiling.tile},
        do_image_splitting=tiling.split,
        image_mean=list(MEAN),
        image_std=list(DEVIATION),
        return_row_col_info=True,
    )


def normalised(tiles: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[tiles, 3, side, side] in fp32."""
    table = levels(1 / 255, MEAN, DEVIATION)
    return np.stack([table[at][tiles[..., at]] for at in range(3)], 1)


def check(data: bytes, tiling: Tiling, made: Any) -> None:
    tiles, rows, columns = made
    opened = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    wanted = processor(tiling)(opened, return_tensors="np")
    assert (wanted["rows"], wanted["cols"]) == ([[rows]], [[columns]])
    pixels = wanted["pixel_values"][0]
    assert pixels.dtype == np.float32
    assert pixels.shape == (len(tiles), 3, tiling.tile, tiling.tile)
    assert np.array_equal(normalised(tiles), pixels)
    assert wanted["pixel_attention_mask"].all()


ODD = ((1, 1), (1, 2), (2, 1), (1, 31), (33, 1), (3_000, 1), (1, 3_000), (32, 32), (96, 96))


def test_pixels_of_two_hundred_pictures_are_those_of_transformers() -> None:
    draw = np.random.default_rng(38)
    for at in range(200):
        format, mode, more = FORMATS[at % len(FORMATS)]
        width, height = ODD[at] if at < len(ODD) else map(int, draw.integers(1, 300, 2))
        more = dict(more)
        if format in ("JPEG", "PNG", "WEBP") and at % 3 == 0:
            exif = Image.Exif()
            exif[0x0112] = int(draw.integers(1, 9))
            more["exif"] = exif
        data = encoded(drawn(draw, width, height, mode), format, **more)
        tiling = SMALL._replace(split=bool(at % 4), longest=(96, 100, 64, 31)[at % 4])
        check(data, tiling, ours(data, tiling))


@pytest.mark.parametrize(
    ("size", "tiling"),
    [
        ((30_000, 1), Tiling(2048, 512, True)),
        ((1, 30_000), Tiling(1456, 364, True)),
        ((777, 1_033), Tiling(1024, 512, True)),
        ((640, 480), Tiling(1024, 512, False)),
    ],
)
def test_real_sizes_through_the_confined_child(size: tuple[int, int], tiling: Tiling) -> None:
    data = encoded(drawn(np.random.default_rng(3), *size, "RGB"), "PNG")
    made = decode_picture(data, tiling)
    assert (made.width, made.height, made.format) == (*size, "png")
    check(data, tiling, (made.tiles, made.rows, made.columns))


def test_sizes_above_four_thousand_are_those_of_transformers() -> None:
    draw = np.random.default_rng(9)
    for _ in range(300):
        width, height, longest = map(int, draw.integers(1, 9_000, 3))
        shape = np.broadcast_to(np.uint8(0), (3, height, width))
        wanted = get_resize_output_image_size(shape, longest)
        assert cut(width, height, Tiling(longest, 512, True)).sizes[0] == wanted[::-1]


@pytest.mark.parametrize(("format", "mode", "more"), FORMATS)
def test_every_format_through_the_confined_child(
    format: str, mode: str, more: dict[str, Any]
) -> None:
    """Modules that Pillow imports late would not be found there."""
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = {"exif": exif} if format in ("JPEG", "PNG", "WEBP") else {}
    data = encoded(drawn(np.random.default_rng(5), 70, 40, mode), format, **more, **turned)
    made = decode_picture(data, SMALL)
    assert (made.width, made.height) == ((40, 70) if turned else (70, 40))
    check(data, SMALL, (made.tiles, made.rows, made.columns))


def test_a_photograph_of_two_frames_is_its_first() -> None:
    draw = np.random.default_rng(6)
    one, two = (drawn(draw, 50, 60, "RGB") for _ in range(2))
    for format in ("MPO", "GIF", "WEBP", "PNG"):
        data = encoded(one, format, save_all=True, append_images=[two])
        made = decode_picture(data, SMALL)
        assert made.format == {"MPO": "jpeg"}.get(format, format.lower())
        check(data, SMALL, (made.tiles, made.rows, made.columns))


def test_grey_of_sixteen_bits_keeps_its_high_byte() -> None:
    """Pillow's own conversion clips: nearly all of such a picture would be white."""
    grey = np.linspace(0, 65_535, 64 * 48).astype(np.uint16).reshape(48, 64)
    deep = decode_picture(encoded(Image.fromarray(grey), "PNG"), SMALL)
    flat = decode_picture(encoded(Image.fromarray((grey >> 8).astype(np.uint8)), "PNG"), SMALL)
    assert np.array_equal(deep.tiles, flat.tiles)
    assert len(np.unique(deep.tiles)) > 200


def test_grey_of_sixteen_bits_has_no_transparent_level() -> None:
    grey = np.linspace(0, 65_535, 64 * 48).astype(np.uint16).reshape(48, 64)
    plain, named = (
        decode_picture(encoded(Image.fromarray(grey), "PNG", **more), SMALL)
        for more in ({}, {"transparency": int(grey[9, 9])})
    )
    assert np.array_equal(plain.tiles, named.tiles)


def test_names_and_types_do_not_choose_the_decoder() -> None:
    for head, name in ((b"\xff\xd8\xff\xe0", "jpeg"), (b"RIFF\0\0\0\0WEBPVP8 ", "webp")):
        assert picture_format(head) == name
    for data in (
        b"",
        b"%PDF-1.7",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"RIFF\0\0\0\0WAVEfmt ",
        b"II*\0" + bytes(64),
        b"P6 1 1 255 abc",
        b"8BPS" + bytes(64),
        b"\0\0\0\x1cftypavif",
        b"%!PS-Adobe-3.0 EPSF-3.0",
    ):
        assert picture_format(data) is None
        with pytest.raises(InvalidRequest, match="not a picture of a known format"):
            decode_picture(data, SMALL)


def png(width: int, height: int, rows: bytes, *, kind: int = 2) -> bytes:
    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(rows, 9))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (png(60_000, 60_000, b""), "large"),
        (png(2**31 - 1, 2**31 - 1, b""), "large"),
        (png(70_000, 1, b""), "large"),
        (png(0, 5, b""), "damaged"),
        (png(5, 5, b""), "damaged"),
        (b"GIF89a\xff\xff\xff\xff\0\0\0" + bytes(30), ""),
        (b"BM" + struct.pack("<IIIIiiHH", 60, 0, 54, 40, 1 << 20, 1 << 20, 1, 24) + b"\0" * 24, ""),
        (b"\xff\xd8\xff\xe0" + bytes(200), "damaged"),
        (b"RIFF\x20\0\0\0WEBPVP8X" + bytes(30), "damaged"),
    ],
)
def test_headers_that_lie_and_bombs(data: bytes, why: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode_picture(data, SMALL)
    assert refused.value.message in ([PICTURE_REFUSALS[why]] if why else PICTURE_REFUSALS.values())


def test_what_is_cut_off_is_refused() -> None:
    """A PNG alone may end after its first rows: the others are then black, as Pillow has it."""
    draw = np.random.default_rng(4)
    for format in ("JPEG", "PNG", "WEBP", "BMP", "GIF"):
        whole = encoded(drawn(draw, 90, 80, "P" if format == "GIF" else "RGB"), format)
        with pytest.raises(InvalidRequest, match="cannot be decoded"):
            decode_picture(whole[: len(whole) // 2], SMALL)
    short = decode_picture(png(50, 40, bytes(151)), SMALL)
    assert not short.tiles.any()


def test_a_frame_larger_than_its_file_says_is_refused() -> None:
    """The logical screen of a GIF may be one pixel, with a frame of 65,535 × 65,535 on it."""
    head = b"GIF89a" + struct.pack("<HHBBB", 1, 1, 0, 0, 0)
    frame = b"," + struct.pack("<HHHHB", 0, 0, 65_535, 65_535, 0) + b"\x08\x01\0\0"
    with pytest.raises(InvalidRequest) as refused:
        decode_picture(head + frame + b";", SMALL)
    assert refused.value.message in (PICTURE_REFUSALS["large"], PICTURE_REFUSALS["damaged"])


def test_limits() -> None:
    data = encoded(drawn(np.random.default_rng(7), 300, 200, "RGB"), "PNG")
    with pytest.raises(TooLarge, match="at most 10 are"):
        decode_picture(data, SMALL, PictureLimits(bytes=10))
    for limits, why in (
        (PictureLimits(pixels=59_999), "large"),
        (PictureLimits(side=299), "large"),
        (PictureLimits(tiles=6), "tiles"),
        (PictureLimits(wall_seconds=0.001), "time"),
        (PictureLimits(memory=8 << 20), "lost"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            decode_picture(data, SMALL, limits, param="messages.0")
        assert refused.value.message == PICTURE_REFUSALS[why], why
        assert refused.value.param == "messages.0"
    assert decode_picture(data, SMALL, PictureLimits(pixels=60_000, tiles=7)).rows == 2


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_whole_picture_has_the_pixels_of_the_file(format: str) -> None:
    picture = drawn(np.random.default_rng(5), 61, 40, "RGB")
    data = encoded(picture, format)
    made = decode_picture(data, Reducing(64))
    opened = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert (made.width, made.height, made.format, made.rows) == (61, 40, format.lower(), 0)
    assert np.array_equal(made.tiles, opened[None])


def test_a_whole_picture_is_reduced_and_turned() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = drawn(np.random.default_rng(6), 300, 100, "RGB")
    made = decode_picture(encoded(picture, "PNG", exif=exif), Reducing(150))
    assert (made.width, made.height) == (100, 300)
    wanted = picture.transpose(Image.Transpose.ROTATE_270).resize(
        (50, 150), Image.Resampling.BILINEAR
    )
    assert np.array_equal(made.tiles, np.asarray(wanted)[None])
    with pytest.raises(InvalidRequest, match="more pixels"):
        decode_picture(encoded(picture, "PNG"), Reducing(150), PictureLimits(pixels=29_999))


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {"rows": 2, "columns": 2},
        {"rows": -1, "columns": -1, "width": 1, "height": 1},
        {"rows": 2, "columns": 0, "width": 1, "height": 1},
        {"rows": True, "columns": True, "width": 1, "height": 1},
        {"rows": 9, "columns": 9, "width": 1, "height": 1},
        {"refused": "words of a decoder"},
        {"refused": []},
        {"rows": 0, "columns": 0, "width": 1, "height": 1, "refused": "words of a decoder"},
        {"absent": 5},
        {"absent": "a" * 64},
    ],
)
def test_an_answer_of_a_child_is_not_believed(answer: Any) -> None:
    believable = partial(_believable, limits=PictureLimits(tiles=20), rule=SMALL)
    given = json.loads(json.dumps(answer))
    assert checked(given, PICTURE_REFUSALS, believable) == {"refused": "lost"}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("head -c 2000 /dev/zero; exec sleep 100", "lost"),
        ("echo '{\"refused\": \"time\"}'; head -c 2000 /dev/zero | tr '\\0' ' '", "lost"),
        ("head -c 1000 /dev/zero | tr '\\0' '['", "lost"),
        ("exec sleep 100 >&-", "time"),
        ('echo \'{"refused": "damaged"}\'', "damaged"),
    ],
)
def test_an_answer_of_a_child_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    program = tmp_path / "child"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with (tmp_path / "in").open("w+b") as source, (tmp_path / "out").open("w+b") as target:
        seconds = 1.0 if why == "time" else 30.0
        assert run_child("none", {}, source, target, seconds, None) == {"refused": why}


def test_a_mutated_picture_leaves_nothing_in_this_process() -> None:
    draw = np.random.default_rng(8)
    whole = encoded(drawn(draw, 40, 30, "RGB"), "PNG")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for cut_off in (8, 60, len(whole) - 4):
        with contextlib.suppress(HeadraceError):
            decode_picture(whole[:cut_off], SMALL)
    assert not before or len(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.skipif(sys.platform != "linux", reason="files in memory and /proc are Linux's")
def test_mutated_pictures_harm_nobody() -> None:
    """Ten thousand: each becomes tiles or one refusal, none crashes its child, none grows."""
    command = [sys.executable, Path(__file__).parent / "mutated_pictures.py", "10000", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    counts = told["outcomes"]
    assert not told["unknown"], counts
    assert sum(counts.values()) == 10_000
    assert counts["tiles"] > 500
    assert counts["damaged"] > 500
    assert told["peak_kib"] < 400 << 10, "of the largest child"
    assert told["grown_kib"] < 4 << 10
    assert not told["descriptors_more"]

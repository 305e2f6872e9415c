"""Decoding of a video's bytes to the frames that a model takes, in one confined child process per
file."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..base.errors import InvalidRequest
from ..base.filming import Film, Sampling, filmed
from ..base.filming import written as written_sampling
from ..base.tiling import Cut, Filming, Sizing, TooNarrow, cut, written
from .confined import OnChild, check_size, decoded, memory_file
from .formats import FFMPEG, HEAD, container
from .pictures import Codes

VIDEO_REFUSALS = {
    "format": "the file is not a video of a known format; mp4 (mov) and webm (mkv) are taken",
    "codec": "the codec inside of the file is not taken; h264, hevc, vp8, vp9, av1, mpeg4 and "
    "mjpeg are",
    "damaged": "the video cannot be decoded",
    "empty": "the file has no frames",
    "rate": "the video must have between 0.01 and 1,000 frames a second",
    "large": "the frames have more pixels than are taken here",
    "long": "the video has more frames, or more pixels in all of them, than are taken here",
    "narrow": "one side of the frames is more than 200 times as long as the other",
    "tiles": "the frames that the model takes need more room than there is; max_frames takes fewer",
    "time": "the video took too long to decode",
    "room": "the server has no room for the pixels",
    "lost": "the video cannot be decoded within the limits of memory and time",
}
"""Code from the child → clause for the user. A decoder's own words are never shown."""
RATES = 0.01, 1_000.0
"""Fewest and most frames of a second."""


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """Limits on one file. A request may lower them, never raise them."""

    bytes: int = 100 << 20
    """Size of the file."""
    pixels: int = 4_096 * 2_304
    """Width times height of a frame, both declared and decoded."""
    side: int = 1 << 14
    """Longest side in pixels."""
    frames: int = 1 << 16
    """Frames of the file, both declared and counted."""
    decoded: int = 1 << 34
    """Pixels of all frames up to the last one that is taken: 8,200 frames of 1080p."""
    tile: int = 1 << 24
    """Pixels of a frame as the model takes it."""
    resized: int = 1 << 28
    """Pixels of all these."""
    memory: int = 3 << 29
    """Bytes of address space of the child."""
    wall_seconds: float = 120.0
    """Time from the start of the child until it is killed."""


@dataclass(frozen=True, slots=True)
class Video:
    """The frames of a video that a model takes."""

    frames: Codes
    """[frames, height, width, 3] in RGB."""
    film: Film
    width: int
    """Pixels of the file's frames."""
    height: int


def sized(width: int, height: int, film: Film, rule: Sizing) -> Cut:
    """Return what becomes of the frames of a video. Raises `TooNarrow`."""
    if isinstance(rule, Filming):
        rule = rule._replace(frames=len(film.frames))
    return cut(width, height, rule)


def decode_video(
    data: bytes,
    sampling: Sampling,
    rule: Sizing,
    limits: VideoLimits = VideoLimits(),
    param: str = "file",
    on_child: OnChild | None = None,
) -> Video:
    """Decode the frames of a video's first track that a model takes, and resize them.

    `param`, `on_child`: see `decode_picture`. Blocks until decoding ends: call it in a thread.
    Raises `InvalidRequest` if the file is no video, is damaged or has too many frames or pixels,
    and `TooLarge` if it has too many bytes. Raises `PackageAbsent` without PyAV or Pillow, and
    `Overloaded` if there is no memory for the result.
    """
    check_size(data, limits.bytes, param)
    format = container(bytes(data[:HEAD]))
    if format not in FFMPEG:
        raise InvalidRequest(VIDEO_REFUSALS["format"], param=param)
    order = {
        "format": format,
        "sampling": written_sampling(sampling),
        "rule": written(rule),
        "pixels": limits.pixels,
        "side": limits.side,
        "frames": limits.frames,
        "decoded": limits.decoded,
        "tile": limits.tile,
        "resized": limits.resized,
        "memory": limits.memory,
        "result": 3 * limits.resized,
    }
    believable = partial(_believable, limits=limits, sampling=sampling, rule=rule)
    words = VIDEO_REFUSALS, ("reading videos needs", "av", "pictures"), param, on_child
    with memory_file("frames") as target:
        answer = decoded(
            "video_child", data, order, target, limits.wall_seconds, believable, *words
        )
        film = filmed(answer["total"], answer["rate"], sampling)
        wide, high = sized(answer["width"], answer["height"], film, rule).tile
        frames = np.empty((len(film.frames), high, wide, 3), np.uint8)
        if os.preadv(target.fileno(), [frames.data.cast("B")], 0) != frames.nbytes:
            raise InvalidRequest(VIDEO_REFUSALS["lost"], param=param)
    return Video(frames, film, answer["width"], answer["height"])


def _believable(
    answer: dict[str, Any], limits: VideoLimits, sampling: Sampling, rule: Sizing
) -> bool:
    total, rate = answer.get("total"), answer.get("rate")
    sides = [answer.get(name) for name in ("width", "height")]
    if type(total) is not int or not 1 <= total <= limits.frames:
        return False
    if not isinstance(rate, float) or not math.isfinite(rate):
        return False
    if not RATES[0] <= rate <= RATES[1]:
        return False
    if not all(type(one) is int and 1 <= one <= limits.side for one in sides):
        return False
    film = filmed(total, rate, sampling)
    try:
        tile = sized(answer["width"], answer["height"], film, rule).tile
    except TooNarrow:
        return False
    pixels = tile[0] * tile[1]
    return pixels <= limits.tile and pixels * len(film.frames) <= limits.resized

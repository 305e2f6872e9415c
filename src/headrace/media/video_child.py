"""Child process that decodes a video: `python -m headrace.media.video_child` for one file.

It writes frames: rows of pixels in RGB, a byte each. Sizes are read from the header, and frames are
counted, before anything is decoded.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any, BinaryIO

from ..base.filming import Film, Sampling, filmed
from ..base.tiling import TooNarrow, read
from .child import imported as imported_ffmpeg
from .decoder import FileRefused, run_decoder, writing
from .formats import FFMPEG
from .videos import RATES, sized

CODECS = {
    "h264", "hevc", "vp8", "vp9", "libvpx", "libvpx-vp9", "av1", "libdav1d", "mpeg4", "mjpeg",
}  # fmt: skip
"""FFmpeg's names of the decoders that are used."""


class FewerFrames(Exception):
    """Fewer frames came than were counted: some packets of a file show none."""

    def __init__(self, found: int) -> None:
        super().__init__(found)
        self.found = found


def imported(format: str) -> tuple[Any, Any]:
    """Import PyAV whole, and Pillow; return both. Raises `ImportError`."""
    pillow = import_module("PIL.Image")
    import_module("PIL.ImageFile")  # It is imported at the first `tobytes`.
    return imported_ffmpeg(format, sound=False)[0], pillow


def decode(order: dict[str, Any], libraries: tuple[Any, Any]) -> dict[str, Any]:
    """Write the frames of a video that are taken."""
    av, pillow = libraries
    source = os.fdopen(0, "rb", buffering=0, closefd=False)
    with os.fdopen(order["into"], "wb", closefd=False) as target:
        try:
            return _frames(order, av, pillow, source, target, None)
        except FewerFrames as fewer:
            if not fewer.found:
                raise FileRefused("damaged") from None
            return _frames(order, av, pillow, source, target, fewer.found)


def _frames(
    order: dict[str, Any], av: Any, pillow: Any, source: BinaryIO, target: Any, total: int | None
) -> dict[str, Any]:
    """Write the frames that are taken, of `total`; None: they are counted."""
    source.seek(0)
    with av.open(source, format=FFMPEG[order["format"]]) as opened:
        if not opened.streams.video:
            raise FileRefused("empty")
        track = opened.streams.video[0]
        coded = track.codec_context
        if coded is None or coded.name not in CODECS:
            raise FileRefused("codec")
        coded.thread_count = 1  # It may start no thread.
        width, height, rate = track.width, track.height, float(track.average_rate or 0)
        if not width or not height:
            raise FileRefused("empty")
        if width * height > order["pixels"] or max(width, height) > order["side"]:
            raise FileRefused("large")
        if not RATES[0] <= rate <= RATES[1]:
            raise FileRefused("rate")
        if total is None:
            total = _counted(opened, track, order["frames"])
            opened.seek(0)
        film = filmed(total, rate, Sampling(*order["sampling"]))
        if (film.frames[-1] + 1) * width * height > order["decoded"]:
            raise FileRefused("long")
        try:
            found = sized(width, height, film, read(order["rule"]))
        except TooNarrow:
            raise FileRefused("narrow") from None
        pixels = found.tile[0] * found.tile[1]
        if pixels > order["tile"] or pixels * len(film.frames) > order["resized"]:
            raise FileRefused("tiles")
        _write(opened, track, film, found, pillow, target)
    return {"total": total, "rate": rate, "width": width, "height": height}


def _counted(opened: Any, track: Any, most: int) -> int:
    """Count the frames of a track by its packets, of which none is decoded."""
    declared, found, shown = track.frames, 0, 0
    if declared > most:
        raise FileRefused("long")
    for packet in opened.demux(track):
        if packet.size:
            found += 1
            shown += not packet.is_discard
            if found > most:
                raise FileRefused("long")
    if found < declared:
        raise FileRefused("damaged")  # The file was cut.
    if not shown:
        raise FileRefused("empty")
    return shown


def _write(opened: Any, track: Any, film: Film, found: Any, pillow: Any, target: Any) -> None:
    """Decode up to the last frame that is taken, and write those in their size."""
    wanted, last, seen = set(film.frames), film.frames[-1], 0
    resample = pillow.Resampling[found.filter.upper()]
    target.seek(0)
    for number, frame in enumerate(opened.decode(track)):
        if (frame.width, frame.height) != (track.width, track.height):
            raise FileRefused("damaged")
        seen = number + 1
        if number in wanted:
            picture = pillow.fromarray(_coloured(frame).to_ndarray())
            for size in found.sizes:
                picture = picture.resize(size, resample=resample)
            with writing():
                target.write(picture.tobytes())
                target.flush()
        if number == last:
            return
    raise FewerFrames(seen)


def _coloured(frame: Any) -> Any:
    """Convert a frame to RGB, as transformers does by PyAV."""
    try:
        return frame.reformat(format="rgb24", threads=1)  # It may start no thread.
    except TypeError:  # Older versions have no such argument, and start none.
        return frame.reformat(format="rgb24")


if __name__ == "__main__":
    run_decoder(imported, decode)

"""Videos from hostile bytes to frames: those that PyAV gives, or one typed refusal."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra pictures")
pytest.importorskip("av", reason="needs the extra av")
import av
from PIL import Image

from headrace.base.errors import InvalidRequest, TooLarge
from headrace.base.filming import Sampling
from headrace.base.tiling import Filming, Fitting, Tiling
from headrace.media import VIDEO_REFUSALS, VideoLimits, decode_video
from headrace.media.videos import sized
from tiny.filmed import drawn, file_of

EVERY, FIT = Sampling("even", 2.0, 4, 768, 2), Fitting(8, 64, 36 * 64)
CODECS = [("libx264", "mp4"), ("libx265", "mp4"), ("libvpx-vp9", "webm"), ("mpeg4", "mov")]


def refused(data: bytes, limits: VideoLimits | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode_video(data, EVERY, FIT, limits or VideoLimits(), param="here")
    assert caught.value.param == "here"
    return next(code for code, said in VIDEO_REFUSALS.items() if said == caught.value.message)


@pytest.mark.parametrize(("codec", "form"), CODECS)
def test_frames_are_those_of_pyav(codec: str, form: str) -> None:
    data = file_of(drawn(23, 70, 40), 10, codec, form)
    found = decode_video(data, EVERY, FIT)
    assert (found.width, found.height, found.film.total, found.film.rate) == (70, 40, 23, 10.0)
    assert found.film.frames == (0, 5, 11, 17)
    with av.open(io.BytesIO(data)) as opened:
        every = [frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)]
    size = sized(70, 40, found.film, FIT).tile
    for number, frame in zip(found.film.frames, found.frames, strict=True):
        wanted = Image.fromarray(every[number]).resize(size, Image.Resampling.BICUBIC)
        assert np.array_equal(frame, np.array(wanted))


def test_frames_are_sized_by_all_of_them_or_twice() -> None:
    data = file_of(drawn(40, 96, 64), 10)
    spread = decode_video(data, EVERY._replace(rule="spread"), Filming(8, 64, 8 * 24 * 64, 2))
    assert spread.frames.shape == (8, 32, 48, 3)
    tiled = decode_video(data, Sampling("centred", 1.0, 1, 3), Tiling(48, 32, False))
    assert (tiled.frames.shape, tiled.film.frames) == ((3, 32, 32, 3), (0, 19, 39))
    assert tiled.film.seconds == 4.0


def test_what_is_refused() -> None:
    data = file_of(drawn(30, 64, 48), 10)
    limits = VideoLimits()
    assert refused(b"no video at all") == "format"
    sound = io.BytesIO()
    with av.open(sound, "w", format="mp4") as made:
        track = made.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16_000
        for packet in [*track.encode(frame), *track.encode()]:
            made.mux(packet)
    assert refused(sound.getvalue()) == "empty"
    for part in (3, 2, 1):
        assert refused(data[: part * len(data) // 4]) == "damaged"
    assert refused(data, VideoLimits(pixels=64 * 47)) == "large"
    assert refused(data, VideoLimits(side=63)) == "large"
    assert refused(data, VideoLimits(frames=29)) == "long"
    assert refused(data, VideoLimits(decoded=64 * 48 * 25)) == "long"
    assert refused(data, VideoLimits(tile=1_000)) == "tiles"
    assert refused(data, VideoLimits(resized=10_000)) == "tiles"
    assert refused(data, VideoLimits(wall_seconds=0.01)) == "time"
    with pytest.raises(TooLarge):
        decode_video(data, EVERY, FIT, VideoLimits(bytes=len(data) - 1))
    assert len(decode_video(data, EVERY.lowered(2), FIT, limits).frames) == 2


@pytest.mark.parametrize("field", ["size", "frames"])
def test_headers_that_lie(field: str) -> None:
    data = file_of(drawn(30, 64, 48), 10)
    if field == "size":
        # Width and height of the track and of its sample description, in two forms.
        wrong = data.replace((64).to_bytes(2) + (48).to_bytes(2), b"\x40\x00\x40\x00")
        assert wrong != data
        with_size = decode_video(wrong, EVERY, FIT)
        assert (with_size.width, with_size.height) == (64, 48), "the codec's own header counts"
        return
    at = data.index(b"stsz") + 12
    assert int.from_bytes(data[at : at + 4]) == 30
    for count in (2**31 - 1, 2**32 - 1):
        wrong = data[:at] + count.to_bytes(4) + data[at + 4 :]
        assert refused(wrong) in {"damaged", "long", "empty"}


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.skipif(sys.platform != "linux", reason="files in memory and /proc are Linux's")
def test_mutated_videos_harm_nobody() -> None:
    """Ten thousand: each becomes frames or one refusal, none crashes its child, none grows."""
    # libvpx writes past its own memory where a side is shorter (AVX2).
    wholes = [
        base64.b64encode(file_of(drawn(10, 64, 48), 10, codec, form)).decode()
        for codec, form in [*CODECS, ("libvpx", "webm")]
    ]
    command = [sys.executable, Path(__file__).parent / "mutated_videos.py", "10000", "8"]
    done = subprocess.run(
        command, input=json.dumps(wholes), capture_output=True, text=True, check=True
    )
    counts, unknown, memory, files = json.loads(done.stdout)
    assert not unknown, counts
    assert sum(counts.values()) == 10_000
    assert counts["frames"] > 500
    assert counts["damaged"] > 500
    assert memory < 600 << 10, "kilobytes of the largest child"
    assert files < 16

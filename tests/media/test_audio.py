"""Sound in: what comes out of each format, and what each limit refuses."""

from __future__ import annotations

import io
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("soundfile")
pytest.importorskip("soxr")
import soundfile

from headrace.base.errors import HeadraceError, InvalidRequest, TooLarge
from headrace.media import RATE, AudioLimits, Sound, declared, decode
from headrace.media.formats import REFUSALS, container


def tone(seconds: float = 0.5, rate: int = 44_100, channels: int = 2) -> np.ndarray:
    t = np.arange(int(seconds * rate)) / rate
    return np.stack([0.5 * np.sin(2 * np.pi * 440 * t)] * channels, 1).astype(np.float32)


def file(format: str, subtype: str | None = None, rate: int = 44_100, **shape: float) -> bytes:
    room = io.BytesIO()
    soundfile.write(room, tone(rate=rate, **shape), rate, format=format, subtype=subtype)
    return room.getvalue()


@pytest.mark.parametrize(
    ("format", "subtype", "rate"),
    [
        ("WAV", "PCM_16", 44_100),
        ("WAV", "PCM_U8", 8_000),
        ("WAV", "DOUBLE", 48_000),
        ("WAV", "ULAW", 8_000),
        ("FLAC", None, 44_100),
        ("OGG", "VORBIS", 44_100),
        ("OGG", "OPUS", 48_000),
        ("MP3", None, 44_100),
    ],
)
def test_a_tone_comes_out_of_each_format(format: str, subtype: str | None, rate: int) -> None:
    sound = decode(file(format, subtype, rate))
    assert (sound.format, sound.rate, sound.channels) == (format.lower(), rate, 2)
    assert abs(sound.seconds - 0.5) < 0.06, "coded formats pad to whole frames"
    middle = sound.samples[RATE // 8 : RATE // 8 + 4096] * np.hanning(4096)
    peak = np.argmax(np.abs(np.fft.rfft(middle))) * RATE / 4096
    assert abs(peak - 440) < 5


def test_what_is_at_the_rate_already_is_not_touched() -> None:
    room = io.BytesIO()
    given = tone(rate=RATE, channels=1)
    soundfile.write(room, given, RATE, format="WAV", subtype="FLOAT")
    assert np.array_equal(decode(room.getvalue()).samples, given[:, 0])


def test_the_length_is_exact_by_sample_after_resampling() -> None:
    for rate in (8_000, 22_050, 44_100):
        sound = decode(file("WAV", "FLOAT", rate, seconds=1.0))
        assert abs(len(sound.samples) - RATE) <= 1


@pytest.mark.parametrize("limits", [AudioLimits(seconds=0.2)])
def test_a_declared_length_is_refused_before_it_is_decoded(limits: AudioLimits) -> None:
    with pytest.raises(InvalidRequest, match="longer than is taken"):
        decode(file("FLAC"), limits)


def test_a_long_mp3_is_refused() -> None:

    with pytest.raises(InvalidRequest, match="longer than is taken"):
        decode(file("MP3", seconds=3.0), AudioLimits(seconds=0.5))


def test_too_many_bytes_are_refused_unread() -> None:
    with pytest.raises(TooLarge, match="at most 10 are"):
        decode(b"RIFF" + bytes(20), AudioLimits(bytes=10))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"#EXTM3U\n#EXTINF:1,\nhttp://169.254.169.254/latest/meta-data\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"http://example.com/a.wav",
        b"RIFF\0\0\0\0AVI LIST",
        b"\x89PNG\r\n\x1a\n",
        b"1\n00:00:00,000 --> 00:00:01,000\nfile:///etc/passwd\n",
    ],
)
def test_what_names_other_files_reaches_no_decoder(data: bytes) -> None:
    assert container(data) is None
    with pytest.raises(InvalidRequest, match="not a sound of a known format"):
        decode(data)


def test_no_samples_and_no_number() -> None:
    with pytest.raises(InvalidRequest, match="no samples"):
        decode(file("WAV", seconds=0.0))
    room = io.BytesIO()
    broken = np.array([0, np.nan, np.inf, -np.inf, 0.5], np.float32)
    soundfile.write(room, broken, RATE, format="WAV", subtype="FLOAT")
    assert np.isfinite(decode(room.getvalue()).samples).all()


def chunk(name: bytes, data: bytes, size: int | None = None) -> bytes:
    stated = len(data) if size is None else size
    return name + struct.pack("<I", stated) + data + bytes(len(data) % 2)


def wav(*chunks: bytes, size: int | None = None) -> bytes:
    form = chunk(b"fmt ", struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16))
    inner = b"WAVE" + form + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(inner) if size is None else size) + inner


SAMPLES = (np.arange(1, 1601) % 100 * 200).astype("<i2").tobytes()
NOTE = chunk(b"LIST", b"INFOISFT\x06\0\0\0abcdef")


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (wav(chunk(b"data", SAMPLES, 0)), SAMPLES),
        (wav(chunk(b"data", SAMPLES, 0), size=0), SAMPLES),
        (wav(NOTE, chunk(b"data", SAMPLES, 0), size=0xFFFFFFFF), SAMPLES),
        (wav(chunk(b"data", SAMPLES, 0xFFFFFFFF), size=0xFFFFFFFF), SAMPLES),
        (wav(chunk(b"data", SAMPLES, 2_000_000_000)), SAMPLES),
        (wav(chunk(b"data", SAMPLES), chunk(b"data", SAMPLES[:800])), SAMPLES[:800]),
        (wav(chunk(b"data", SAMPLES), NOTE), SAMPLES),
        (wav(chunk(b"data", b"")), None),
        (wav(chunk(b"data", b""), NOTE), None),
    ],
)
def test_a_wav_whose_head_does_not_know_its_length(data: bytes, wanted: bytes | None) -> None:
    """A writer that was not closed leaves such: what is there is taken, as FFmpeg takes it."""
    if wanted is None:
        with pytest.raises(InvalidRequest, match="no samples"):
            decode(data)
        return
    assert np.array_equal(
        decode(data).samples, np.frombuffer(wanted, "<i2").astype(np.float32) / 32_768
    )


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_lengths_that_heads_declare(rate: int) -> None:
    for format, subtype in (("WAV", "PCM_16"), ("WAV", "FLOAT"), ("WAV", "ULAW"), ("FLAC", None)):
        assert abs((declared(file(format, subtype, rate)) or 0) - 0.5) < 0.01
    for data in (file("MP3", None, 44_100), file("WAV", "IMA_ADPCM", rate), b"", b"RIFF0000WAVE"):
        assert declared(data) is None
    for end in range(len(whole := file("FLAC"))):
        declared(whole[: min(end, 64)])
        declared(wav(b"")[:end])


def test_a_decoder_without_memory_is_one_refusal() -> None:
    with pytest.raises(InvalidRequest) as refused:
        decode(file("FLAC", seconds=30.0), AudioLimits(memory=8 << 20))
    assert refused.value.message in REFUSALS.values()


def test_a_decoder_that_takes_too_long_is_killed() -> None:
    with pytest.raises(InvalidRequest, match="too long to decode"):
        decode(file("FLAC"), AudioLimits(wall_seconds=0.001))


CONFINED = """
import json, os, signal, socket, sys
from headrace.media import seccomp
if len(sys.argv) > 1: seccomp.only_compute = lambda libc: False
seccomp.confine(1 << 30, 5, 1024)
found = []
tries = (
    lambda: open("/etc/passwd"), lambda: socket.socket(), lambda: os.pipe(),
    lambda: os.kill(os.getppid(), 0), lambda: os.stat("/etc/passwd"), lambda: os.fork(),
    lambda: os.execv("/bin/true", ["true"]), lambda: os.rename("/nothing", "/nowhere"),
    lambda: os.read(os.memfd_create("x"), 1),
)
for what in tries[:3] if len(sys.argv) > 1 else tries:
    try: what(); found.append("done")
    except PermissionError: found.append("refused")
    except OSError: found.append("failed")
print(json.dumps(found))
"""


def confined(*how: str) -> list[str]:
    command = [sys.executable, "-c", CONFINED, *how]
    found: list[str] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def test_a_child_opens_nothing_once_it_is_confined() -> None:
    assert "done" not in confined("without the filter")


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason="there is a filter of system calls for Linux on x86-64 and 64-bit ARM",
)
def test_a_child_has_few_system_calls() -> None:
    """It signals nobody, looks at no file and starts nothing, whoever runs the server."""
    assert confined() == ["refused"] * 9


@pytest.mark.slow
@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_mutated_files_are_samples_or_one_refusal(format: str) -> None:
    """Bytes changed, cut and doubled at random; the error is one of ours and says nothing of a
    decoder, and this process holds no more descriptors than before."""
    whole, draw = file(format, seconds=0.2), np.random.default_rng(5)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    for _ in range(40):
        data = bytearray(whole)
        for at in draw.integers(0, len(data), draw.integers(1, 40)):
            data[at] = draw.integers(0, 256)
        cut = int(draw.integers(0, len(data) + 1))
        data = data[:cut] if draw.random() < 0.3 else data + data[cut:]
        try:
            outcome: Sound | HeadraceError = decode(bytes(data))
        except HeadraceError as error:
            outcome = error
        if isinstance(outcome, HeadraceError):
            assert outcome.status == 400
            assert outcome.message in REFUSALS.values()
        else:
            assert np.isfinite(outcome.samples).all()
    assert not before or len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg to make the file")
@pytest.mark.parametrize("name", ["a.m4a", "a.webm"])
def test_containers_of_video(tmp_path: Path, name: str) -> None:
    """Decoded with the extra `av`; without it the error says how to get it."""
    (tmp_path / "a.wav").write_bytes(file("WAV", seconds=1.0))
    command = ["ffmpeg", "-v", "quiet", "-i", tmp_path / "a.wav", tmp_path / name]
    subprocess.run(command, check=True)
    try:
        import av  # noqa: F401
    except ImportError:
        with pytest.raises(HeadraceError, match=r"\[av\]"):
            decode((tmp_path / name).read_bytes())
        return
    sound = decode((tmp_path / name).read_bytes())
    assert abs(sound.seconds - 1.0) < 0.1

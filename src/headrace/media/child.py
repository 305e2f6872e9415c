"""Child process that decodes a sound: `python -m headrace.media.child` for one file."""

from __future__ import annotations

import io
import os
import pkgutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from .decoder import FileRefused, run_decoder, writing
from .formats import FFMPEG

Block = npt.NDArray[np.float32]
_BLOCK = 1 << 16
"""Frames decoded per block."""
_SUBTYPES = ("PCM_", "FLOAT", "DOUBLE", "ULAW", "ALAW", "VORBIS", "OPUS", "MPEG_LAYER_III")
_CODECS = ("aac", "opus", "mp3", "mp3float", "vorbis", "flac", "alac")
_MOST_CHUNKS = 1000
"""Chunks of a WAV that are examined."""


def imported(format: str, *, sound: bool = True) -> tuple[Any, Any]:
    """Import the libraries that read a format and, for a sound, resample it, and all modules that
    they load lazily. Raises `ImportError`."""
    soxr = import_module("soxr") if sound else None

    if format not in FFMPEG:
        import soundfile

        return soundfile, soxr
    import av

    for module in pkgutil.walk_packages(av.__path__, "av."):
        # PyAV imports some modules only when a file needs them; after confinement that fails.
        with suppress(ImportError):
            import_module(module.name)
    return av, soxr


def decode(order: dict[str, Any], libraries: tuple[Any, Any]) -> dict[str, Any]:
    """Write the samples of a sound: fp32, one channel, at the rate of the order."""
    library, soxr = libraries
    source = os.fdopen(0, "rb", buffering=0, closefd=False)
    read = _by_ffmpeg if order["format"] in FFMPEG else _by_soundfile
    blocks = read(order, library, source)
    rate, channels = next(blocks)
    wanted, most = int(order["rate"]), float(order["seconds"])
    if not 1_000 <= rate <= 384_000:
        raise FileRefused("rate")
    if not 1 <= channels <= 8:
        raise FileRefused("channels")
    resampler = None if rate == wanted else soxr.ResampleStream(rate, wanted, 1, dtype="float32")
    taken = given = 0
    with os.fdopen(order["into"], "wb", closefd=False) as target:
        for block in blocks:
            taken += len(block)
            if taken > most * rate:
                raise FileRefused("long")
            mono = np.ascontiguousarray(block.mean(axis=1, dtype=np.float32))
            mono = mono if resampler is None else resampler.resample_chunk(mono)
            given += _write(target, mono)
        if resampler is not None:
            given += _write(target, resampler.resample_chunk(np.empty(0, np.float32), last=True))
    if not given:
        raise FileRefused("empty")
    return {"samples": given, "frames": taken, "rate": rate, "channels": channels}


def _write(target: BinaryIO, mono: Block) -> int:
    # NaN, or a value far beyond full scale, would become NaN in a model.
    with writing():
        target.write(np.clip(np.nan_to_num(mono), -8.0, 8.0).tobytes())
        target.flush()
    return len(mono)


def _by_soundfile(order: dict[str, Any], soundfile: Any, source: BinaryIO) -> Iterator[Any]:
    """Yield (rate, channels), then fp32 blocks [frames, channels]."""
    whole = mended(source) if order["format"] == "wav" else source
    with soundfile.SoundFile(whole) as sound:
        if not sound.subtype.startswith(_SUBTYPES):
            raise FileRefused("codec")
        declared = sound.frames
        if declared < 2**62 and declared > order["seconds"] * sound.samplerate:
            raise FileRefused("long")
        yield sound.samplerate, sound.channels
        while len(block := sound.read(_BLOCK, dtype="float32", always_2d=True)):
            yield block


def mended(source: BinaryIO) -> BinaryIO:
    """Return a WAV whose header gives the place of its samples; an unclosed writer leaves size 0.

    The last of several data chunks counts, as in FFmpeg. A correct file is returned unchanged.
    """
    end = source.seek(0, os.SEEK_END)
    source.seek(0)
    form, found, at = (0, 0), [], 12
    for _ in range(_MOST_CHUNKS):
        head = os.pread(source.fileno(), 8, at)
        if len(head) < 8 or not (head[:4].isascii() and head[:4].decode().isprintable()):
            break
        at, size = at + 8, int.from_bytes(head[4:], "little")
        if head[:4] == b"fmt ":
            form = at, size
        if head[:4] == b"data":
            found.append((at, size))
        at += size + size % 2
    if not found:
        return source
    start, size = found[-1]
    if size == 0 and at < end:
        size = end - start  # The bytes after it are not a chunk, so they are samples.
    elif len(found) == 1:
        return source
    form_at, form_size = form
    form_data = os.pread(source.fileno(), min(form_size, 64), form_at)
    samples = os.pread(source.fileno(), size, start)
    inner = b"WAVEfmt " + struct.pack("<I", len(form_data)) + form_data
    inner += b"data" + struct.pack("<I", len(samples))
    return io.BytesIO(b"RIFF" + struct.pack("<I", len(inner) + len(samples)) + inner + samples)


def _by_ffmpeg(order: dict[str, Any], av: Any, source: BinaryIO) -> Iterator[Any]:
    """Yield (rate, channels), then fp32 blocks [frames, channels] of the first audio track."""
    with av.open(source, format=FFMPEG[order["format"]]) as opened:
        if not opened.streams.audio:
            raise FileRefused("empty")
        track = opened.streams.audio[0]
        name = track.codec_context.name
        if name not in _CODECS and not name.startswith("pcm_"):
            raise FileRefused("codec")
        if opened.duration and opened.duration > order["seconds"] * 1_000_000:
            raise FileRefused("long")
        rate, channels = track.codec_context.sample_rate, track.codec_context.layout.nb_channels
        yield rate, channels
        convert = av.AudioResampler(format="flt", layout=track.layout, rate=rate)
        for frame in opened.decode(track):
            for same in convert.resample(frame):
                yield same.to_ndarray().reshape(-1, channels)


if __name__ == "__main__":
    run_decoder(imported, decode)

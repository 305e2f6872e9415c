"""Mutated files of sound through the decoder's child: does one harm anybody?

    python benchmarks/hostile_sounds.py [--count 100000] [--seed 1] [--json FILE]

Small real files of every format whose library is installed have bits flipped, parts cut out,
doubled and zeroed, and numbers of their first bytes replaced by the extreme ones (lengths, rates,
channels, sizes of chunks); half of the Ogg pages get their checksum mended, so that what is wrong
reaches the decoder. Each goes to a fork of a process that has imported what `media.child` imports,
which then does what that does: it gives up all but decoding, decodes, and says what came of it.
What it said is read as `media.audio` reads it.

Fails (exit 1) where an answer is neither samples nor a refusal of the list, a child outlives its
limit, samples are no numbers, or this process grows. A decoder that ends by a signal is one
request's refusal and is counted, with the mutated file kept under `--keep`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import soundfile

from headrace.media import RATE, AudioLimits
from headrace.media.audio import believable
from headrace.media.child import imported, obey
from headrace.media.formats import FFMPEG, HEAD, container

WALL = 20.0
"""Seconds that a child has, of its processor and of the clock."""
LIMITS = AudioLimits(seconds=60.0, wall_seconds=WALL)
SOURCES = (
    ("WAV", "PCM_16", 16_000),
    ("WAV", "PCM_U8", 8_000),
    ("WAV", "PCM_24", 44_100),
    ("WAV", "DOUBLE", 48_000),
    ("WAV", "ULAW", 8_000),
    ("WAV", "IMA_ADPCM", 16_000),
    ("RF64", "FLOAT", 16_000),
    ("FLAC", "PCM_16", 16_000),
    ("FLAC", "PCM_24", 44_100),
    ("OGG", "VORBIS", 22_050),
    ("OGG", "OPUS", 48_000),
    ("MP3", "MPEG_LAYER_III", 44_100),
    ("MP3", "MPEG_LAYER_III", 16_000),
)
WITH_AV = (("mp4", "aac", 44_100), ("mp4", "alac", 16_000), ("webm", "libopus", 48_000))
EXTREMES = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
Draw = np.random.Generator


def sources() -> dict[str, bytes]:
    """Small files by what they are, two channels where the format has them."""
    t = np.arange(4_000) / 16_000
    tone = np.stack([0.4 * np.sin(2 * np.pi * f * t) for f in (440, 660)], 1).astype(np.float32)
    found = {}
    for format, subtype, rate in SOURCES:
        room = io.BytesIO()
        soundfile.write(room, tone, rate, format=format, subtype=subtype)
        found[f"{format} {subtype} {rate}"] = room.getvalue()
    for format, codec, rate in WITH_AV:
        try:
            found[f"{format} {codec} {rate}"] = by_av(format, codec, rate, tone)
        except ImportError:
            break
    return found


def by_av(format: str, codec: str, rate: int, tone: Any) -> bytes:
    import av

    room = io.BytesIO()
    with av.open(room, "w", format=format) as opened:
        track = opened.add_stream(codec, rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(tone.reshape(1, -1)), format="flt", layout="stereo"
        )
        frame.sample_rate = rate
        opened.mux(track.encode(frame))
        opened.mux(track.encode(None))
    return room.getvalue()


# Mutations: each changes a file in place


def flip(data: bytearray, draw: Draw) -> None:
    for at in draw.integers(0, 8 * len(data), draw.integers(1, 24)):
        data[at // 8] ^= 1 << (at % 8)


def change(data: bytearray, draw: Draw) -> None:
    for at in draw.integers(0, len(data), draw.integers(1, 40)):
        data[at] = draw.integers(0, 256)


def lie(data: bytearray, draw: Draw) -> None:
    """Extreme numbers where a head has numbers."""
    for _ in range(draw.integers(1, 5)):
        size = int(draw.choice((1, 2, 4, 8)))
        at = int(draw.integers(0, max(1, min(len(data), 160) - size)))
        value = int(draw.choice(EXTREMES)) & ((1 << 8 * size) - 1)
        data[at : at + size] = value.to_bytes(size, "little" if draw.random() < 0.5 else "big")


def cut(data: bytearray, draw: Draw) -> None:
    del data[int(draw.integers(0, len(data))) :]


def excise(data: bytearray, draw: Draw) -> None:
    at = int(draw.integers(0, len(data)))
    del data[at : at + int(draw.integers(1, 200))]


def double(data: bytearray, draw: Draw) -> None:
    at, to = (int(one) for one in draw.integers(0, len(data), 2))
    data[to:to] = data[at : at + int(draw.integers(1, 2_000))] * int(draw.integers(1, 4))


def zero(data: bytearray, draw: Draw) -> None:
    at = int(draw.integers(0, len(data)))
    size = min(len(data) - at, int(draw.integers(1, 400)))
    data[at : at + size] = bytes([int(draw.choice((0, 255)))]) * size


MUTATIONS: tuple[Callable[[bytearray, Draw], None], ...] = (
    flip,
    change,
    lie,
    cut,
    excise,
    double,
    zero,
)


def _ogg_table() -> list[int]:
    found = []
    for byte in range(256):
        value = byte << 24
        for _ in range(8):
            value = (value << 1 ^ (0x04C11DB7 if value & 0x80000000 else 0)) & 0xFFFFFFFF
        found.append(value)
    return found


OGG_TABLE = _ogg_table()


def mend_pages(data: bytearray) -> None:
    """Give each Ogg page (RFC 3533) the checksum of what it holds by now."""
    at = data.find(b"OggS")
    while 0 <= at <= len(data) - 27:
        sizes = data[at + 27 : at + 27 + data[at + 26]]
        end = min(len(data), at + 27 + len(sizes) + sum(sizes))
        data[at + 22 : at + 26] = bytes(4)
        value = 0
        for byte in data[at:end]:
            value = (value << 8 ^ OGG_TABLE[value >> 24 ^ byte]) & 0xFFFFFFFF
        data[at + 22 : at + 26] = value.to_bytes(4, "little")
        at = data.find(b"OggS", max(end, at + 4))


def mutated(whole: bytes, other: bytes, draw: Draw) -> bytes:
    """A file that was `whole`; now and then it ends as `other` does."""
    data = bytearray(whole)
    for _ in range(draw.integers(1, 4)):
        if data:
            MUTATIONS[draw.integers(0, len(MUTATIONS))](data, draw)
    if draw.random() < 0.05:
        at = int(draw.integers(0, len(data) + 1))
        data[at:] = other[at:]
    if data[:4] == b"OggS" and draw.random() < 0.5:
        mend_pages(data)
    if draw.random() < 0.9:
        # What no decoder would be shown teaches nothing.
        data[:4], data[8:HEAD] = whole[:4], whole[8:HEAD]
    return bytes(data)


class Decoders:
    """Forks of this process, one for each file: what `audio.decode_into` starts, imported once."""

    def __init__(self) -> None:
        self._libraries: dict[bool, Any] = {}
        self._source = os.memfd_create("source")
        self._target = os.memfd_create("target")
        self.seconds = 0.0
        """The longest that one took."""
        self.peak = 0
        """The most memory that one held, in KiB, with this process's own that it shares."""
        self.wild = 0
        """Answers of samples that are no numbers."""

    def outcome(self, data: bytes) -> str:
        """samples, the code of a refusal, or what ended the child."""
        format = container(data[:HEAD])
        if format is None:
            return "format"
        of = format in FFMPEG
        if of not in self._libraries:
            self._libraries[of] = imported(format)
        for file in (self._source, self._target):
            os.ftruncate(file, 0)
        os.pwrite(self._source, data, 0)
        os.lseek(self._source, 0, os.SEEK_SET)
        os.lseek(self._target, 0, os.SEEK_SET)
        hear, say = os.pipe()
        begin = time.monotonic()
        child = os.fork()
        if not child:
            self._child(format, self._libraries[of], say)
        os.close(say)
        ready, _, _ = select.select([hear], [], [], WALL)
        if not ready:
            os.kill(child, signal.SIGKILL)
        said = os.read(hear, 1024) if ready else b""
        os.close(hear)
        _, status, usage = os.wait4(child, 0)
        self.seconds = max(self.seconds, time.monotonic() - begin)
        self.peak = max(self.peak, usage.ru_maxrss)
        if not ready:
            return "time"
        if os.WIFSIGNALED(status):
            return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
        return self._read(said)

    def _read(self, said: bytes) -> str:
        most = int(LIMITS.seconds * RATE + RATE) * 4
        try:
            answer = json.loads(said)
        except ValueError:
            return "lost"
        if not believable(answer, most):
            return "not believable"
        if "refused" in answer:
            return str(answer["refused"])
        if os.fstat(self._target).st_size < 4 * answer["samples"]:
            return "fewer samples than said"
        samples = np.frombuffer(os.pread(self._target, 4 * answer["samples"], 0), np.float32)
        self.wild += not np.isfinite(samples).all()
        return "samples"

    def _child(self, format: str, libraries: Any, say: int) -> None:
        try:
            os.dup2(self._source, 0)
            os.dup2(say, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.stdout = os.fdopen(1, "w", closefd=False)
            order = {
                "format": format,
                "rate": RATE,
                "seconds": LIMITS.seconds,
                "memory": LIMITS.memory,
                "processor_seconds": WALL,
                "result": int(LIMITS.seconds * RATE + RATE) * 4,
                "into": self._target,
            }
            obey(order, *libraries)
        finally:
            os._exit(0)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--keep", type=Path, help="folder for files that ended a decoder")
    given = arguments.parse_args()
    files, draw, decoders = sources(), np.random.default_rng(given.seed), Decoders()
    names = list(files)
    for name in names:
        wanted = "codec" if "ADPCM" in name else "samples"
        assert decoders.outcome(files[name]) == wanted, f"{name} as it is"
    here, found = psutil.Process(), {name: Counter[str]() for name in names}
    begin = time.monotonic()
    first = (0, 0)
    for number in range(given.count):
        name, other = names[number % len(names)], names[draw.integers(0, len(names))]
        data = mutated(files[name], files[other], draw)
        outcome = decoders.outcome(data)
        found[name][outcome] += 1
        if given.keep and outcome.startswith(("signal", "time")):
            given.keep.mkdir(parents=True, exist_ok=True)
            (given.keep / f"{name.replace(' ', '_')}-{number}-{outcome}").write_bytes(data)
        if number == given.count // 10:
            first = here.memory_info().rss, here.num_fds()
    total = sum(found.values(), Counter())
    grown = here.memory_info().rss - first[0]
    record = {
        "count": given.count,
        "seed": given.seed,
        "seconds": round(time.monotonic() - begin, 1),
        "longest_seconds": round(decoders.seconds, 2),
        "peak_mib": round(decoders.peak / 1024),
        "grown_mib": round(grown / 2**20, 2),
        "descriptors_more": here.num_fds() - first[1],
        "no_numbers": decoders.wild,
        "outcomes": dict(total.most_common()),
        "by_source": {name: dict(one.most_common()) for name, one in found.items()},
        "libsndfile": soundfile.__libsndfile_version__,
        "machine": platform.platform(),
    }
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    wrong = total["not believable"] + total["fewer samples than said"] + total["lost"]
    late = total["time"] + decoders.wild
    return int(bool(wrong or late or grown > 4 << 20 or record["descriptors_more"]))


if __name__ == "__main__":
    sys.exit(main())

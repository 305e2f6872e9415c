"""Decoding of a file's bytes to samples, in one child process per file with a time limit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest
from .confined import OnChild, check_size, decoded, memory_file
from .formats import FFMPEG, HEAD, REFUSALS, container

RATE = 16_000
"""Samples per second of `decode`'s result."""


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """Limits on one file. A request may lower them, never raise them."""

    bytes: int = 25 << 20
    """Size of the file; OpenAI's limit is the same."""
    seconds: float = 4 * 3600.0
    """Length of the sound, both declared and decoded."""
    memory: int = 1 << 30
    """Bytes of address space of the child."""
    wall_seconds: float = 120.0
    """Time from the start of the child until it is killed."""


@dataclass(frozen=True, slots=True)
class Sound:
    """Samples [n] in fp32 at `RATE`, one channel: the mean of the file's channels."""

    samples: npt.NDArray[np.float32]
    format: str
    rate: int
    """Sampling rate of the file itself."""
    channels: int

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


@dataclass(frozen=True, slots=True)
class Decoded:
    """Properties of a decoded file; its samples were written to the target."""

    count: int
    """Number of samples at `RATE`."""
    format: str
    rate: int
    channels: int


def decode(
    data: bytes,
    limits: AudioLimits = AudioLimits(),
    param: str = "file",
    on_child: OnChild | None = None,
) -> Sound:
    """Decode a file's sound into memory; raises and blocks as `decode_into`."""
    with memory_file("samples") as target:
        found = decode_into(data, target, limits, param, on_child)
        samples = np.empty(found.count, np.float32)
        if os.preadv(target.fileno(), [samples.data.cast("B")], 0) != samples.nbytes:
            raise InvalidRequest(REFUSALS["lost"], param=param)
    return Sound(samples, found.format, found.rate, found.channels)


def decode_into(
    data: bytes | bytearray,
    target: BinaryIO,
    limits: AudioLimits = AudioLimits(),
    param: str = "file",
    on_child: OnChild | None = None,
) -> Decoded:
    """Write the sound of a file to `target`: fp32 samples at `RATE`, one channel.

    `param`: the field that errors name. `on_child` gets the child as soon as it exists. Blocks
    until decoding ends: call it in a thread. Raises `InvalidRequest` if the file is not a sound, is
    damaged or too long, and `TooLarge` if it has too many bytes. Raises `PackageAbsent` if the
    format's library is not installed, and `Overloaded` if the target's disk is full.
    """
    check_size(data, limits.bytes, param)
    format = container(bytes(data[:HEAD]))
    if format is None:
        raise InvalidRequest(REFUSALS["format"], param=param)
    result = int(limits.seconds * RATE + RATE) * 4
    order = {
        "format": format,
        "rate": RATE,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "result": result,
    }

    def believable(answer: dict[str, Any]) -> bool:
        numbers = [answer.get(name) for name in ("samples", "rate", "channels")]
        positive = all(isinstance(one, int) and one > 0 for one in numbers)
        return positive and 4 * answer["samples"] <= result

    needs = f"reading {format} needs", "audio", *(("av",) if format in FFMPEG else ())
    words = REFUSALS, needs, param, on_child
    answer = decoded("child", data, order, target, limits.wall_seconds, believable, *words)
    if os.fstat(target.fileno()).st_size < 4 * answer["samples"]:
        raise InvalidRequest(REFUSALS["lost"], param=param)
    return Decoded(answer["samples"], format, answer["rate"], answer["channels"])

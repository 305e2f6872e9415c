"""Decoding of a file's bytes to samples, in one child process per file with a time limit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest, Overloaded, TooLarge
from ..base.extras import absent
from .confined import OnChild, memory_file, run_child
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
    if len(data) > limits.bytes:
        raise TooLarge(
            f"the file has {len(data):,} bytes, at most {limits.bytes:,} are taken", param=param
        )
    format = container(bytes(data[:HEAD]))
    if format is None:
        raise InvalidRequest(REFUSALS["format"], param=param)
    with memory_file("sound") as source:
        source.write(data)
        source.flush()
        os.lseek(source.fileno(), 0, os.SEEK_SET)
        answer = _child(source, target, format, limits, on_child)
    if "absent" in answer:
        extras = ("audio", "av") if format in FFMPEG else ("audio",)
        raise absent(f"reading {format} needs", answer["absent"], *extras)
    if answer.get("refused") == "room":
        raise Overloaded(REFUSALS["room"], retry_after=5.0)
    if "refused" in answer:
        raise InvalidRequest(REFUSALS[answer["refused"]], param=param)
    if os.fstat(target.fileno()).st_size < 4 * answer["samples"]:
        raise InvalidRequest(REFUSALS["lost"], param=param)
    return Decoded(answer["samples"], format, answer["rate"], answer["channels"])


def _child(
    source: BinaryIO,
    target: BinaryIO,
    format: str,
    limits: AudioLimits,
    on_child: OnChild | None,
) -> dict[str, Any]:
    """Run the child; return its answer, or `{"refused": …}` if the answer cannot be trusted."""
    result = int(limits.seconds * RATE + RATE) * 4
    order = {
        "format": format,
        "rate": RATE,
        "seconds": limits.seconds,
        "memory": limits.memory,
        "result": result,
    }
    answer = run_child("child", order, source, target, limits.wall_seconds, on_child)
    return answer if believable(answer, result) else {"refused": "lost"}


def believable(answer: Any, result: int) -> bool:
    """Check that the answer has one of the three known forms: a compromised child may send
    anything."""
    if not isinstance(answer, dict):
        return False
    if "samples" in answer:
        numbers = [answer.get(name) for name in ("samples", "rate", "channels")]
        return all(isinstance(one, int) and one > 0 for one in numbers) and (
            4 * answer["samples"] <= result
        )
    return answer.get("refused") in REFUSALS or isinstance(answer.get("absent"), str)

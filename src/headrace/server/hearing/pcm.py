"""Conversion of a session's samples, in any of its formats, to 16 bits at 16 kHz."""

from __future__ import annotations

import base64
import binascii
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...base.errors import InvalidRequest
from ...base.extras import needed
from ...media import RATE

Floats = npt.NDArray[np.float32]
FULL = np.float32(32768)
LATE = 2048
"""Maximum samples that a resampler may hold back."""
PCM_RATES = (16_000, 24_000)


def _mu_law() -> Floats:
    """Compute the sample of each code, by ITU-T G.711."""
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    size = (((code & 0x0F) << 3) + 0x84 << ((code & 0x70) >> 4)) - 0x84
    return (np.where(code & 0x80, -size, size) / 32768).astype(np.float32)


def _a_law() -> Floats:
    """Compute the sample of each code, by ITU-T G.711."""
    code = np.arange(256, dtype=np.int32) ^ 0x55
    part, low = (code & 0x70) >> 4, (code & 0x0F) << 4
    size = np.where(part == 0, low + 8, (low + 0x108) << np.maximum(part - 1, 0))
    return (np.where(code & 0x80, size, -size) / 32768).astype(np.float32)


_TABLES = {"audio/pcmu": _mu_law(), "audio/pcma": _a_law()}


class Intake:
    """One stream of samples."""

    def __init__(self, format: str, rate: int) -> None:
        """Prepare a conversion from audio/pcm (16 bits, little endian), audio/pcmu or audio/pcma.

        Raises `PackageAbsent`.
        """
        soxr = needed("soxr", "sessions", "audio")
        self._table = _TABLES.get(format)
        self._rate = rate
        self._new: Any = partial(soxr.ResampleStream, rate, RATE, 1, dtype="float32")
        self._stream: Any = None if rate == RATE else self._new()
        self._odd = b""
        """First byte of a sample whose second byte has not arrived."""

    def most(self, size: int) -> int:
        """Return the maximum number of samples that `size` bytes can become."""
        return (size if self._table is not None else size // 2 + 1) * RATE // self._rate + LATE

    def take(self, data: bytes) -> bytes:
        """Convert the next bytes of the stream to 16-bit samples; a resampler holds back a few."""
        if self._table is not None:
            samples: Floats = self._table[np.frombuffer(data, np.uint8)]
        else:
            data = self._odd + data
            whole = len(data) // 2 * 2
            data, self._odd = data[:whole], data[whole:]
            if self._stream is None:
                return data
            samples = floats(data)
        return _of_floats(samples if self._stream is None else self._stream.resample_chunk(samples))

    def rest(self) -> bytes:
        """Return the samples that the resampler held back, and reset it."""
        if self._stream is None:
            return b""
        held: Floats = self._stream.resample_chunk(np.empty(0, np.float32), last=True)
        self._stream = self._new()
        return _of_floats(held)

    def clear(self) -> None:
        """Drop buffered data: the next byte is the first of a sample."""
        self.rest()
        self._odd = b""


def floats(data: bytes | bytearray | memoryview) -> Floats:
    """Convert samples of 16 bits to fp32 from -1 to 1."""
    return np.frombuffer(data, "<i2").astype(np.float32) / FULL


def _of_floats(samples: Floats) -> bytes:
    whole = np.clip(np.rint(samples * FULL), -FULL, FULL - 1).astype("<i2")
    return bytes(whole.tobytes())


def decoded(text: Any) -> bytes:
    """Decode the base64 of an event. Raises `InvalidRequest`."""
    if not isinstance(text, str):
        raise InvalidRequest("audio must be base64", param="audio")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("audio is not base64", param="audio") from None

"""Samples of a session's client, in whichever of its formats, to fp32 at 16 kHz."""

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
PCM_RATES = (16_000, 24_000)


def _mu_law() -> Floats:
    """Sample of each code, by ITU-T G.711."""
    code = ~np.arange(256, dtype=np.int32) & 0xFF
    size = (((code & 0x0F) << 3) + 0x84 << ((code & 0x70) >> 4)) - 0x84
    return (np.where(code & 0x80, -size, size) / 32768).astype(np.float32)


def _a_law() -> Floats:
    """Sample of each code, by ITU-T G.711."""
    code = np.arange(256, dtype=np.int32) ^ 0x55
    part, low = (code & 0x70) >> 4, (code & 0x0F) << 4
    size = np.where(part == 0, low + 8, (low + 0x108) << np.maximum(part - 1, 0))
    return (np.where(code & 0x80, size, -size) / 32768).astype(np.float32)


_TABLES = {"audio/pcmu": _mu_law(), "audio/pcma": _a_law()}


class Intake:
    """One stream of samples."""

    def __init__(self, format: str, rate: int) -> None:
        """`format`: audio/pcm (16 bits, little endian), audio/pcmu or audio/pcma. Raises
        `PackageAbsent`."""
        soxr = needed("soxr", "sessions", "audio")
        self._table = _TABLES.get(format)
        self._new: Any = partial(soxr.ResampleStream, rate, RATE, 1, dtype="float32")
        self._stream: Any = None if rate == RATE else self._new()

    def take(self, data: bytes) -> Floats:
        """What can be said of the stream with these bytes: nearly all of it. Raises
        `InvalidRequest`."""
        if self._table is not None:
            samples: Floats = self._table[np.frombuffer(data, np.uint8)]
        elif len(data) % 2:
            raise InvalidRequest("pcm has two bytes a sample", param="audio", code="invalid_audio")
        else:
            samples = np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)
        return samples if self._stream is None else self._stream.resample_chunk(samples)

    def rest(self) -> Floats:
        """What was still held back; the stream begins anew."""
        if self._stream is None:
            return np.empty(0, np.float32)
        held: Floats = self._stream.resample_chunk(np.empty(0, np.float32), last=True)
        self._stream = self._new()
        return held


def decoded(text: Any) -> bytes:
    """Bytes of an event's base64. Raises `InvalidRequest`."""
    if not isinstance(text, str):
        raise InvalidRequest("audio must be base64", param="audio")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest("audio is not base64", param="audio") from None

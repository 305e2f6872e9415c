"""Encoding of samples as a sound file, while they arrive.

Bytes already returned are never changed. A WAV header therefore leaves the length unknown. An MP3
has a constant bit rate, from which players know its length. A FLAC header states the length before
the first sample, and readers need it right, so a FLAC file is returned only at the end.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest
from ..base.extras import needed

Floats = npt.NDArray[np.float32]
MEDIA_TYPES = {
    "pcm": "audio/pcm",
    "wav": "audio/wav",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "mp3": "audio/mpeg",
}
"""Format → media type of the response."""
_SOUNDFILE: dict[str, dict[str, Any]] = {
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
    "opus": {"format": "OGG", "subtype": "OPUS"},
    # 64 kbit/s at 24 kHz.
    "mp3": {
        "format": "MP3",
        "subtype": "MPEG_LAYER_III",
        "bitrate_mode": "CONSTANT",
        "compression_level": 0.6,
    },
}
_UNKNOWN = 0xFFFFFFFF


class SoundWriter:
    """Encoder of one sound with one channel: `write` and `end` return the next bytes of its
    file."""

    def __init__(self, format: str, rate: int) -> None:
        """Create the encoder for `format`, a key of `MEDIA_TYPES`.

        Raises `PackageAbsent` if the format needs the extra `audio`, and `InvalidRequest` if the
        library cannot write it at this rate.
        """
        self._coder: Any = None
        self._at_end = format == "flac"
        self._file = _GrowingFile()
        if format == "wav":
            self._file.write(wav_head(rate))
        elif format in _SOUNDFILE:
            soundfile = needed("soundfile", f"sounds as {format}", "audio")
            try:
                self._coder = soundfile.SoundFile(self._file, "w", rate, 1, **_SOUNDFILE[format])
            except (soundfile.LibsndfileError, ValueError, TypeError) as error:
                raise InvalidRequest(
                    f"response_format {format} cannot be written at {rate:,} Hz here",
                    param="response_format",
                ) from error

    def write(self, samples: Floats) -> bytes:
        """Add samples from -1 to 1; return the bytes that are final, and keep the others."""
        if self._at_end:
            self._coder.write(np.frombuffer(to_pcm(samples), "<i2"))
        elif self._coder is not None:
            self._coder.write(np.clip(samples, -1, 1))
        else:
            self._file.write(to_pcm(samples))
        return b"" if self._at_end else self._file.fresh()

    def end(self) -> bytes:
        """Return the rest of the file."""
        if self._coder is not None:
            self._coder.close()
        return self._file.fresh()


def to_pcm(samples: Floats) -> bytes:
    """Convert samples to 16-bit PCM, little endian."""
    whole = np.rint(np.clip(samples, -1, 1) * np.float32(32767))
    return bytes(whole.astype("<i2").tobytes())


def wav_head(rate: int, data: int | None = None) -> bytes:
    """Return the header of a 16-bit WAV with one channel and `data` bytes of samples; None:
    unknown."""
    whole = _UNKNOWN if data is None else min(data + 36, _UNKNOWN)
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    inner = struct.pack("<4sI", b"data", _UNKNOWN if data is None else min(data, _UNKNOWN))
    return struct.pack("<4sI4s", b"RIFF", whole, b"WAVE") + form + inner


class _GrowingFile(io.BytesIO):
    """File whose bytes are read once. If a coder later overwrites them (lengths in its header),
    that is lost."""

    def __init__(self) -> None:
        super().__init__()
        self._given = 0

    def fresh(self) -> bytes:
        size = self.getbuffer().nbytes
        found = self.getbuffer()[self._given : size].tobytes()
        self._given = size
        return found

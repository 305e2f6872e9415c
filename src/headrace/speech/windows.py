"""A window of a sound in the engine's form: features in sealed memory, and its name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from ..base.spec import InputSpan
from ..dist.payloads import SealedInputs
from ..loader.whisper_files import WhisperFiles
from .features import FRAMES, log_mel

Floats = npt.NDArray[np.float32]
_FRAME_SAMPLES = 320
"""Samples of a position of the encoder's output."""
_LEAST_FRAMES, _BEHIND_FRAMES = 200, 50
"""Fewest positions of a short window, and the positions added after its sound."""


class Windows:
    """The open windows of one model."""

    def __init__(self, files: WhisperFiles) -> None:
        self.files = files
        self._payloads = SealedInputs()

    @contextmanager
    def open(self, samples: Floats, *, short: bool, aligns: bool) -> Iterator[InputSpan]:
        """Open a window of at most 30 s. `short`: only the length of the samples plus a second;
        `aligns`: its words will be requested."""
        rows = self.files.frames
        if short:
            filled = -(-len(samples) // _FRAME_SAMPLES) + _BEHIND_FRAMES
            rows = min(rows, max(_LEAST_FRAMES, filled))
        features = np.zeros((2 * rows + 1, self.files.mels), np.float32)
        features[:FRAMES] = log_mel(samples, self.files.mels)[: 2 * rows + 1]
        kind = b"aligned" if aligns else b""
        digest = blake2b(features.data, digest_size=16, person=kind).digest()
        payload = self._payloads.hold("", features)
        try:
            yield InputSpan(0, 0, "sound", digest, payload.source, rows, aligns=aligns)
        finally:
            payload.close()

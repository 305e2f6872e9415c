"""The input embeddings of a sound for a language model that takes audio, made next to its engine.

The encoder computes in a thread of its own, one sound after the other. Its recent results are kept
by the sound's content, so a conversation that goes on pays nothing: the engine finds its KV by the
same name.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from ...base import hardware
from ...base.errors import UnsupportedModel
from ...base.modelfiles import ModelFiles
from ...kernels.cpu.library import LibraryAbsent, Team
from ...media import AudioLimits, OnChild, decode
from ...speech.network import Precision
from ...speech.sound_rows import SoundRows, open_sound_files

Floats = npt.NDArray[np.float32]
LIMITS = AudioLimits(seconds=60.0)
"""Limits of a decoder; the encoder itself limits the length of a sound."""
KEPT_BYTES = 64 << 20
"""Most bytes of embeddings that are kept."""


class SoundListener:
    """One model's encoder, for an event loop."""

    def __init__(self, files: ModelFiles, threads: int = 0, precision: Precision = "exact") -> None:
        """`threads`: 0 is one for each core. Raises `ModelFileError`, and `UnsupportedModel` also
        without the CPU kernels."""
        opened = open_sound_files(files.path, files.weights, files.arch.hidden)
        try:
            team = Team(threads or hardware.cpu().physical_cores)
        except LibraryAbsent as absent:
            raise UnsupportedModel(f"sounds are heard by the CPU kernels: {absent}") from absent
        self._rows = SoundRows(opened, team, precision)
        self._thread = ThreadPoolExecutor(1, "headrace-listener")
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._size = 0
        self.made = 0
        """Sounds that were encoded; others were kept from before."""

    @property
    def place(self) -> int:
        """The token that stands for a sound."""
        return self._rows.files.place

    def decode(self, data: bytes, param: str, on_child: OnChild | None = None) -> Floats:
        """Decode a sound file; in a thread. Raises as `media.decode`, and `InvalidRequest` for a
        sound that is too short or too long."""
        samples = decode(data, LIMITS, param, on_child).samples
        self._rows.check(samples, param)
        return samples

    async def hear(self, samples: Floats) -> tuple[bytes, Floats]:
        """Return (name of its content, rows [n, D]) of a sound at 16 kHz."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._hear, samples)

    def _hear(self, samples: Floats) -> tuple[bytes, Floats]:
        name = blake2b(samples.tobytes(), digest_size=32).digest()
        data = self._kept.pop(name, None)
        if data is None:
            data = self._rows(samples).tobytes()
            self._size += len(data)
            self.made += 1
        self._kept[name] = data
        while self._size > KEPT_BYTES and len(self._kept) > 1:
            self._size -= len(self._kept.popitem(last=False)[1])
        return name, np.frombuffer(data, np.float32).reshape(-1, self._rows.hidden)

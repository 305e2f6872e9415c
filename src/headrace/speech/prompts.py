"""Sounds of prompts for a language model's encoder: decoded, checked, converted to features.

Nothing here knows the model's weights; the encoder is a part of the model and runs in its worker.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.errors import InvalidRequest
from ..base.modelfiles import ModelFiles
from ..dist.payloads import SealedInputs
from ..loader.sounds import open_sounds
from ..media import AudioLimits, OnChild, decode
from ..models.sounds import KIND, SoundArch
from .features import RATE, WINDOW, log_mel

Floats = npt.NDArray[np.float32]
LIMITS = AudioLimits(seconds=60.0)
"""Limits of a decoder; the encoder itself limits the length of a sound."""
SHORTEST = RATE // 10
"""Smallest number of samples of a sound."""
FORM = 1
"""Version of the features: within one, equal samples have equal names."""
_HOP = 160
"""Samples of a frame of features; a position of the encoder has two of them."""


class PreparedSound(NamedTuple):
    """A sound in the form that the encoder takes."""

    features: Floats
    """[frames, mels]: all that its positions read."""
    digest: bytes
    """`InputSpan.digest`."""
    positions: int
    rows: int
    """Tokens of the prompt that stand for it: one per whole 40 ms."""


class SoundPrompts:
    """Preparation of one model's sounds. `read` and `prepare` may be called from any thread."""

    def __init__(self, sound: SoundArch, model: str) -> None:
        """`model`: name of the model, hashed into the names of sounds."""
        self.sound = sound
        self.payloads = SealedInputs()
        """Sounds in memory that is shared with the engine. For one thread."""
        arch = sound.arch
        said = KIND, FORM, model, sound.mels, arch.hidden, arch.layers, sound.hidden
        self._name = repr(said).encode()

    @property
    def place(self) -> int:
        """The token that stands for a row of a sound."""
        return self.sound.place

    def read(self, data: bytes, param: str, on_child: OnChild | None = None) -> PreparedSound:
        """Decode a sound file. Raises as `media.decode`, and `InvalidRequest` for a sound that is
        too short or too long."""
        samples = decode(data, LIMITS, param, on_child).samples
        if not SHORTEST <= len(samples) <= WINDOW:
            raise InvalidRequest(
                f"a sound of a prompt lasts {SHORTEST / RATE} to {WINDOW // RATE} seconds, this "
                f"one {len(samples) / RATE:.2f}",
                param=param,
            )
        return self.prepare(samples)

    def prepare(self, samples: Floats) -> PreparedSound:
        """Make the features of samples at 16 kHz."""
        frames = -(-len(samples) // _HOP)
        positions = (frames + 1) // 2
        mel = log_mel(samples, self.sound.mels)
        features = np.zeros((self.sound.read(positions), self.sound.mels), np.float32)
        there = min(len(mel), len(features))
        features[:there] = mel[:there]
        digest = blake2b(self._name, digest_size=32)
        digest.update(samples.tobytes())
        return PreparedSound(features, digest.digest(), positions, self.sound.encoded(positions))


def open_prompts(files: ModelFiles) -> SoundPrompts:
    """Return the preparation of sounds for an open model that takes them."""
    sound = open_sounds(files)
    assert sound is not None, "the folder says that it takes sounds"
    return SoundPrompts(sound, files.name)

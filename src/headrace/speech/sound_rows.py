"""Input embeddings of sounds for a language model: Qwen2-Audio (Chu et al. 2024).

Whisper's encoder over as many positions as have sound in them, the mean of each two positions, a
norm, and one product into the model's width. A sound is one window, of 30 seconds at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.arch_fields import Fields
from ..base.errors import InvalidRequest, ModelFileError, UnsupportedModel
from ..kernels.cpu.library import Team
from ..kernels.cpu.panels import Packer
from ..loader.jsonfile import read_json
from ..loader.safetensors_file import StoredTensor, read_header
from .features import RATE, WINDOW, log_mel
from .files import HEAD_SIZE, stacked
from .network import Encoder, Precision
from .product import Product, layer_norm
from .stored import stored

Floats = npt.NDArray[np.float32]
KIND = "qwen2_audio"
"""Value of `model_type` in its config."""
SHORTEST = RATE // 10
"""Smallest number of samples of a sound."""
_HOP = 160
"""Samples of a frame of features; a position of the encoder has two of them."""
_TOWER, _JOINT = "audio_tower", "multi_modal_projector.linear"


@dataclass(frozen=True)
class SoundFiles:
    """A folder's audio encoder, checked; tensors by Whisper's names, as `network.Encoder` needs
    them."""

    place: int
    """Token that stands for a row of a sound."""
    width: int
    encoder_layers: int
    mels: int
    header: Mapping[str, StoredTensor]
    frames: int = WINDOW // _HOP // 2
    decoder_layers: int = 0
    vocab: int = 0
    alignment: tuple[tuple[int, int], ...] = ()

    @property
    def heads(self) -> int:
        return self.width // HEAD_SIZE

    def tensor(self, name: str) -> npt.NDArray[Any]:
        return stacked(self.header, name.replace("model.encoder.", f"{_TOWER}.", 1))


def open_sound_files(folder: Path, weights: Sequence[Path], hidden: int) -> SoundFiles:
    """Open a folder's encoder. `weights`: the folder's safetensors; `hidden`: width of the language
    model. Raises `ModelFileError`, `UnsupportedModel`."""
    config = Fields(read_json(folder / "config.json"), "config.json")
    given = config.mapping("audio_config")
    if given is None:
        raise ModelFileError("config.json: audio_config is missing", param="audio_config")
    sound = Fields(given, "config.json: audio_config")
    width = sound.integer("d_model", HEAD_SIZE, 4_096)
    heads = sound.integer("encoder_attention_heads", 1, 64)
    inner = sound.integer("encoder_ffn_dim", 1, 1 << 15)
    if width != HEAD_SIZE * heads or inner != 4 * width:
        raise UnsupportedModel(
            f"config.json: audio_config: heads of {HEAD_SIZE} and a feed-forward of four times the "
            "width are run"
        )
    sound.expect("activation_function", "gelu")
    sound.expect("scale_embedding", False)
    sound.expect("max_source_positions", WINDOW // _HOP // 2)
    header: dict[str, StoredTensor] = {}
    for path in weights:
        header |= read_header(path)
    found = SoundFiles(
        config.integer("audio_token_index", 0, 2**24),
        width,
        sound.integer("encoder_layers", 1, 64),
        sound.integer("num_mel_bins", 1, 256),
        header,
    )
    shapes = {
        f"{_TOWER}.conv1.weight": (width, found.mels, 3),
        f"{_TOWER}.conv2.weight": (width, width, 3),
        f"{_TOWER}.embed_positions.weight": (found.frames, width),
        f"{_TOWER}.layer_norm.weight": (width,),
        f"{_JOINT}.weight": (hidden, width),
        f"{_JOINT}.bias": (hidden,),
    }
    for layer in range(found.encoder_layers):
        at = f"{_TOWER}.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.{x}_proj.weight": (width, width) for x in ("q", "k", "v", "out")
        }
        shapes |= {f"{at}.fc1.weight": (inner, width), f"{at}.fc2.weight": (width, inner)}
    for name, shape in shapes.items():
        there = header.get(name)
        if there is None or tuple(there.shape) != shape:
            raise ModelFileError(f"{name} is missing, or is not of shape {list(shape)}")
    return found


class SoundRows:
    """Encoder of one sound at a time."""

    def __init__(self, files: SoundFiles, team: Team, precision: Precision) -> None:
        """Load the weights. Raises `ModelFileError` if a tensor is missing."""
        self.files = files
        self.hidden: int = files.header[f"{_JOINT}.weight"].shape[0]
        """Width of the language model."""
        self._encoder = Encoder(files, team, precision, "int8", windows=1)
        self._gain, self._shift = (
            files.tensor(f"model.encoder.layer_norm.{part}").astype(np.float32)
            for part in ("weight", "bias")
        )
        weight = stored(files.header, f"{_JOINT}.weight")
        bias = stored(files.header, f"{_JOINT}.bias").astype(np.float32)
        coded = precision == "int8"
        self._joint = Product(team, Packer(team), weight, bias, coded=coded)

    @staticmethod
    def check(samples: Floats, param: str) -> None:
        """Raise `InvalidRequest` for a sound that is too short or too long."""
        if not SHORTEST <= len(samples) <= WINDOW:
            raise InvalidRequest(
                f"a sound of a prompt lasts {SHORTEST / RATE} to {WINDOW // RATE} seconds, this "
                f"one {len(samples) / RATE:.2f}",
                param=param,
            )

    def __call__(self, samples: Floats) -> Floats:
        """Encode samples at 16 kHz to [n, hidden]: a row for each whole 40 ms."""
        frames = -(-len(samples) // _HOP)
        positions = (frames + 1) // 2
        rows = positions // 2
        for _ in self._encoder.layers(log_mel(samples, self.files.mels), 0, positions):
            pass  # No other window waits here.
        pairs = self._encoder.rows[: 2 * rows].reshape(rows, 2, -1)
        return self._joint(layer_norm(pairs.mean(axis=1), self._gain, self._shift))

"""A language model's encoder of sounds in its folder, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..base.modelfiles import ModelFiles
from ..models.sounds import JOINT, KIND, TOWER, SoundArch, describe_sounds, sound_arch
from .encoder_files import check_shapes, encoder_config
from .safetensors_file import StoredTensor, stored_under
from .weight_source import Named


def open_sounds(files: ModelFiles) -> SoundArch | None:
    """Return the encoder of sounds of an open model, checked against its tensors; None if the model
    has none. Raises `ModelFileError`, `UnsupportedModel`."""
    config = encoder_config(files, (KIND,))
    if config is None:
        return None
    sound = sound_arch(config, files.arch.hidden)
    check_shapes(_tensors(files), _stored_shapes(sound))
    return sound


def _stored_shapes(sound: SoundArch) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in describe_sounds(sound).tensors().items():
        if _absent(name):
            continue
        stem = name.removesuffix(".weight")
        convolves = stem.endswith((".conv1", ".conv2"))
        yield name, (shape[0], shape[1] // 3, 3) if convolves else shape


def sound_weights(files: ModelFiles, sound: SoundArch) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight) of every tensor of the encoder's graph."""
    for name, stored in _tensors(files).items():
        if name.endswith((".conv1.weight", ".conv2.weight")):
            # Kernels [out, in, 3] as products with three rows side by side.
            kernel = stored.read().transpose(0, 2, 1)
            yield name, np.ascontiguousarray(kernel.reshape(len(kernel), -1))
        else:
            yield name, stored
    for layer in range(sound.arch.layers):
        name = f"{TOWER}.layers.{layer}.self_attn.k_proj.bias"
        yield name, np.zeros(sound.arch.hidden, np.float32)


def _tensors(files: ModelFiles) -> dict[str, StoredTensor]:
    return stored_under(files.weights, f"{TOWER}.", f"{JOINT}.")


def _absent(name: str) -> bool:
    """Return whether the graph has a vector that files lack: keys have no bias."""
    return name.endswith(".k_proj.bias")

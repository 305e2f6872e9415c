"""A language model's encoder of pictures in its folder, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..base.errors import HeadraceError, ModelFileError
from ..base.modelfiles import ModelFiles
from ..models.pictures import (
    CHANNELS,
    JOINT,
    KINDS,
    PATCHES,
    PLACES,
    TOWER,
    PictureArch,
    describe_pictures,
    picture_arch,
)
from .jsonfile import read_json
from .safetensors_file import StoredTensor, stored_under
from .weight_source import Named


def open_pictures(files: ModelFiles) -> PictureArch | None:
    """Return the encoder of pictures of an open model, checked against its tensors; None if the
    model has none. Raises `ModelFileError`, `UnsupportedModel`."""
    if files.format == "gguf":
        return None
    try:
        config = read_json(files.path / "config.json")
    except (HeadraceError, OSError):
        return None
    if config.get("model_type") not in KINDS:
        return None
    picture = picture_arch(config, _processing(files), files.arch.hidden)
    there = _tensors(files)
    for name, shape in describe_pictures(picture).tensors().items():
        if name == f"{PATCHES}.weight":
            shape = (shape[0], CHANNELS, picture.patch, picture.patch)
        elif name == f"{PLACES}.weight":
            shape = (picture.trained**2, shape[1])
        found = there.get(name)
        if found is None or tuple(found.shape) != shape:
            raise ModelFileError(f"{name} is missing, or is not of shape {list(shape)}")
    return picture


def picture_weights(files: ModelFiles, picture: PictureArch) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight) of every tensor of the encoder's graph."""
    for name, stored in _tensors(files).items():
        if name == f"{PATCHES}.weight":
            # Kernels [out, channel, row, column]: products with the pixels of a patch.
            yield name, replace(stored, shape=(stored.shape[0], picture.width))
        elif name == f"{PLACES}.weight":
            yield name, np.ascontiguousarray(stored.read()[picture.positions()])
        else:
            yield name, stored


def _processing(files: ModelFiles) -> Mapping[str, Any]:
    """Read what the model's processor does to pictures: a file of its own, or part of another."""
    own, whole = files.path / "preprocessor_config.json", files.path / "processor_config.json"
    if own.is_file():
        return read_json(own)
    given = read_json(whole).get("image_processor") if whole.is_file() else {}
    if not isinstance(given, dict):
        raise ModelFileError("processor_config.json: image_processor must be an object")
    return given


def _tensors(files: ModelFiles) -> dict[str, StoredTensor]:
    return stored_under(files.weights, f"{TOWER}.", f"{JOINT}.")

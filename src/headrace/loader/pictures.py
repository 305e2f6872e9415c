"""A language model's encoder of pictures in its folder, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..base.errors import ModelFileError
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
from .encoder_files import check_shapes, encoder_config
from .jsonfile import read_json
from .safetensors_file import StoredTensor, stored_under
from .weight_source import Named


def open_pictures(files: ModelFiles) -> PictureArch | None:
    """Return the encoder of pictures of an open model, checked against its tensors; None if the
    model has none. Raises `ModelFileError`, `UnsupportedModel`."""
    config = encoder_config(files, KINDS)
    if config is None:
        return None
    picture = picture_arch(config, _processing(files), files.arch.hidden)
    check_shapes(_tensors(files), _stored_shapes(picture))
    return picture


def _stored_shapes(picture: PictureArch) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in describe_pictures(picture).tensors().items():
        if name == f"{PATCHES}.weight":
            yield name, (shape[0], CHANNELS, picture.patch, picture.patch)
        elif name == f"{PLACES}.weight":
            yield name, (picture.trained**2, shape[1])
        else:
            yield name, shape


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

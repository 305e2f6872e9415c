"""A language model's encoder of pictures in its folder, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..base.modelfiles import ModelFiles
from ..kernels.arrays import floats
from ..models.picture_arch import PictureArch
from ..models.pictures import KINDS, describe_pictures, picture_arch
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
    shapes = _shapes(picture).items()
    check_shapes(
        _tensors(files, picture), ((name, picture.stored(name, shape)) for name, shape in shapes)
    )
    return picture


def picture_weights(files: ModelFiles, picture: PictureArch) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight) of every tensor of the encoder's graph."""
    there = _tensors(files, picture)
    for name in describe_pictures(picture).tensors():
        stored, picked = there[name], picture.picked(name)
        if picked is not None:
            yield name, np.ascontiguousarray(stored.read()[picked])
        elif len(stored.shape) == 5:
            # Kernels [out, channel, frame, row, column] over equal frames: one kernel, their sum.
            yield name, floats(stored.read()).sum(2).reshape(stored.shape[0], -1)
        elif len(stored.shape) == 4:
            # Kernels [out, channel, row, column]: products with the pixels of a patch.
            yield name, replace(stored, shape=(stored.shape[0], prod(stored.shape[1:])))
        else:
            yield name, stored


def read_tensor(files: ModelFiles, picture: PictureArch, name: str) -> npt.NDArray[np.float32]:
    """Read a tensor that belongs to the encoder and not to its graph, in fp32."""
    return floats(_tensors(files, picture)[name].read())


def _shapes(picture: PictureArch) -> dict[str, tuple[int, ...]]:
    return describe_pictures(picture).tensors() | picture.beside


def _processing(files: ModelFiles) -> Mapping[str, Any]:
    """Read what the model's processor does to pictures: a file of its own, or part of another."""
    own, whole = files.path / "preprocessor_config.json", files.path / "processor_config.json"
    if own.is_file():
        return read_json(own)
    given = read_json(whole).get("image_processor") if whole.is_file() else {}
    if not isinstance(given, dict):
        raise ModelFileError("processor_config.json: image_processor must be an object")
    return given


def _tensors(files: ModelFiles, picture: PictureArch) -> dict[str, StoredTensor]:
    """Return the encoder's tensors by their names in the graph."""
    found = stored_under(files.weights, *picture.PREFIXES, *picture.RENAMED)
    return {_renamed(name, picture.RENAMED): stored for name, stored in found.items()}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    old = next((old for old in names if name.startswith(old)), "")
    return names[old] + name[len(old) :] if old else name

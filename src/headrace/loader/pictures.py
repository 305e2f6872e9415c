"""A language model's encoder of pictures in its folder, and its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..base.modelfiles import ModelFiles
from ..kernels.arrays import floats
from ..models.picture_arch import CHANNELS, ClassToken, PictureArch, squares
from ..models.pictures import KINDS, describe_pictures, picture_arch
from .encoder_files import check_shapes, encoder_config
from .jsonfile import read_json
from .mmproj import Tensor, configs, mmproj_of, tensors
from .safetensors_file import StoredTensor, stored_under
from .weight_source import Named


def open_pictures(files: ModelFiles) -> PictureArch | None:
    """Return the encoder of pictures of an open model, checked against its tensors; None if the
    model has none. Raises `ModelFileError`, `UnsupportedModel`."""
    picture = _read(files)
    if picture is None:
        return None
    there = _tensors(files, picture)
    if not there:
        return None  # The folder has the language model alone.
    shapes = _shapes(picture).items()
    further = len(describe_pictures(picture).outputs) - 1
    if further > files.arch.layers:
        raise ModelFileError(
            f"config.json: vision_config has rows for {further} layers of a language model with "
            f"{files.arch.layers}"
        )
    check_shapes(there, ((name, picture.stored(name, shape)) for name, shape in shapes))
    return picture


def _read(files: ModelFiles) -> PictureArch | None:
    encoder = mmproj_of(files)
    if encoder is not None:
        picture = picture_arch(*configs(encoder, files), files.arch.hidden)
        # Such files have added the norm's one, and say nothing of videos.
        return replace(picture, arch=replace(picture.arch, norm_offset=0.0), videos=None)
    config = encoder_config(files, KINDS)
    if config is None:
        return None
    pictures = _processor(files.path, "preprocessor_config.json", "image_processor", {})
    videos = _processor(files.path, "video_preprocessor_config.json", "video_processor", None)
    return picture_arch(config, pictures, files.arch.hidden, videos)


def picture_weights(files: ModelFiles, picture: PictureArch) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight) of every tensor of the encoder's graph."""
    there, token = _tensors(files, picture), picture.token
    for name in describe_pictures(picture).tensors():
        if token is not None and name == token.table:
            yield name, _with_class(there, picture, token)
            continue
        stored, picked = there[name], picture.picked(name)
        if by := picture.scaled(name):
            factors = floats(there[by].read())
            yield name, (floats(stored.read()).T * factors).T.copy()
            continue
        if picture.turned(name):
            yield name, np.ascontiguousarray(stored.read().T)
        elif (parts := picture.apart(name)) > 1:
            whole = stored.read()
            dealt = whole.reshape(len(whole), -1, parts).swapaxes(1, 2)
            yield name, np.ascontiguousarray(dealt).reshape(len(whole), -1)
        elif picked is not None:
            yield name, np.ascontiguousarray(stored.read()[picked])
        elif not isinstance(stored, StoredTensor):
            whole = stored.read()
            yield name, whole.reshape(len(whole), -1) if whole.ndim > 3 else whole
        elif len(stored.shape) > 3:
            # Kernels [out, channel, (frame,) row, column]: products with the pixels of a patch.
            yield name, replace(stored, shape=(stored.shape[0], prod(stored.shape[1:])))
        else:
            yield name, stored


def read_tensor(files: ModelFiles, picture: PictureArch, name: str) -> npt.NDArray[np.float32]:
    """Read a tensor that belongs to the encoder and not to its graph, in fp32."""
    return floats(_tensors(files, picture)[name].read())


def _with_class(
    there: Mapping[str, Tensor], picture: PictureArch, token: ClassToken
) -> npt.NDArray[np.float32]:
    """Return the positions of all patches, in the order of squares, and then what turns the product
    of an empty patch into the class token."""
    names = token.positions, token.token, f"{token.patches}.weight"
    positions, own, kernels = (floats(there[name].read()) for name in names)
    means, deviations = (np.array(one, np.float32) for one in (picture.mean, picture.deviation))
    black = ((0 - means) / deviations).astype(np.float64)
    empty = kernels.reshape(len(kernels), CHANNELS, -1).sum(2, dtype=np.float64) @ black
    if token.biased:
        empty = empty + floats(there[f"{token.patches}.bias"].read())
    positions = positions.reshape(-1, positions.shape[-1])
    if token.last:
        positions = np.roll(positions, 1, 0)
    side = isqrt(len(positions) - 1)
    order = np.array(squares(side, side, picture.factor))
    patches = positions[1:][order[:, 0] * side + order[:, 1]]
    last = (positions[:1] + own.reshape(1, -1)) - empty
    return np.concatenate([patches, last]).astype(np.float32)


def _shapes(picture: PictureArch) -> dict[str, tuple[int, ...]]:
    made = set() if picture.token is None else {picture.token.table}
    named = describe_pictures(picture).tensors()
    return {name: shape for name, shape in named.items() if name not in made} | picture.beside


def _processor(folder: Path, own: str, member: str, absent: Any) -> Any:
    """Read the settings of the model's processor from a file of its own, or from its part of the
    whole processor's file; return `absent` if there is neither."""
    if (folder / own).is_file():
        return read_json(folder / own)
    whole = folder / "processor_config.json"
    given = read_json(whole).get(member) if whole.is_file() else absent
    if given is not absent and not isinstance(given, dict):
        raise ModelFileError(f"processor_config.json: {member} must be an object")
    return given


def _tensors(files: ModelFiles, picture: PictureArch) -> Mapping[str, Tensor]:
    """Return the encoder's tensors by their names in the graph."""
    encoder = mmproj_of(files)
    if encoder is not None:
        return tensors(encoder, {**describe_pictures(picture).tensors(), **picture.beside})
    found = stored_under(files.weights, *picture.PREFIXES, *picture.RENAMED)
    return {_renamed(name, picture.RENAMED): stored for name, stored in found.items()}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    old = next((old for old in names if name.startswith(old)), "")
    return names[old] + name[len(old) :] if old else name

"""A folder of diffusers' `DiTPipeline` as a `ModelFiles`, and its weights.

Without a decoder (`vae`) the latents are pictures in one or three channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isqrt, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import ModelFileError, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..models.dit import POSITIONS
from ..models.reader import from_hf
from ..models.registry import describe
from ..quant.ggml_types import DENSE
from .encoder_files import check_shapes
from .folder import NO_TEXT, licence_of
from .jsonfile import read_json
from .shards import find_shards, read_headers
from .weight_source import Named

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

INDEX, FORMAT = "model_index.json", "diffusers"
STEM = "diffusion_pytorch_model"
"""Beginning of the names of weight files."""
MOST_NAME = 200
"""Maximum letters of a class's name."""
_TRANSFORMER = "DiTTransformer2DModel"


def open_pipeline(folder: Path, name: str, licence: str | None = None) -> ModelFiles:
    """Read the small files of a pipeline, and the headers of its weights. Raises `ModelFileError`,
    `UnsupportedModel`."""
    index = read_json(folder / INDEX)
    for key, allowed in (("_class_name", "DiTPipeline"), ("transformer", _TRANSFORMER)):
        _expect(INDEX, key, _class(index, key), allowed)
    if (decoder := _class(index, "vae")) is not None:
        raise UnsupportedModel(
            f"{INDEX}: vae is {decoder!r:.80}; decoders are not supported yet: a folder without "
            "one is served, whose latents are the pictures",
            param="vae",
        )
    parts = {
        part: read_json(folder / part / file)
        for part, file in (("transformer", "config.json"), ("scheduler", "scheduler_config.json"))
    }
    config = parts["transformer"]
    _expect("config.json", "_class_name", config.get("_class_name"), _TRANSFORMER)
    own = {"model_type": "dit", "architectures": [_TRANSFORMER], "scheduler": parts["scheduler"]}
    arch = from_hf({**config, **own})
    denoiser = arch.denoiser
    assert denoiser is not None, "it is of the family"
    if denoiser.channels not in (1, 3):
        raise UnsupportedModel(
            f"config.json: in_channels is {denoiser.channels}; supported without a decoder: 1, 3",
            param="in_channels",
        )
    if arch.hidden % 4:
        raise UnsupportedModel(
            f"config.json: the width is {arch.hidden}; supported: multiples of 4",
            param="attention_head_dim",
        )
    shards = find_shards(folder / "transformer", STEM)
    made = ModelFiles(name, FORMAT, folder, shards, arch, NO_TEXT, None)
    labels = _labels(index.get("id2label"), denoiser.classes)
    return replace(made, licence=licence or licence_of(folder), labels=labels)


def _class(index: Mapping[str, Any], key: str) -> Any:
    """Return the class of a part of a pipeline; None if it has no such part."""
    value = index.get(key)
    return value[-1] if isinstance(value, list) and len(value) == 2 else value


def _expect(where: str, key: str, found: Any, allowed: str) -> None:
    if found != allowed:
        raise UnsupportedModel(f"{where}: {key} is {found!r:.80}; supported: {allowed}", param=key)


def _labels(given: Any, classes: int) -> dict[str, int]:
    """Read the names of classes, several for one with commas, as `DiTPipeline` does."""
    found: dict[str, int] = {}
    if not isinstance(given, dict | None):
        raise ModelFileError(f"{INDEX}: id2label must be an object", param="id2label")
    for key, names in (given or {}).items():
        number = int(key) if key.isascii() and key.isdecimal() and len(key) < 8 else classes
        if number >= classes or not isinstance(names, str):
            raise ModelFileError(
                f"{INDEX}: id2label has {key!r:.40}; allowed: a text for each number below "
                f"{classes}",
                param="id2label",
            )
        for name in names.split(","):
            found.setdefault(name.strip().lower()[:MOST_NAME], number)
    found.pop("", None)
    return found


def denoiser_weights(files: ModelFiles) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight) of every tensor. Raises `ModelFileError`, `UnsupportedModel`."""
    stored = read_headers(files.weights)
    for name, tensor in stored.items():
        if tensor.dtype not in DENSE:
            raise UnsupportedModel(
                f"{tensor.shard.name}: {name:.100} is {tensor.dtype}; supported: {', '.join(DENSE)}"
            )
        if len(tensor.shape) > 2:  # A convolution's kernels: products with the numbers of a patch.
            flat = tensor.shape[0], prod(tensor.shape[1:])
            stored[name] = replace(tensor, shape=flat)
    wanted, table = describe(files.arch).tensors(), f"{POSITIONS}.weight"
    tokens, width = wanted.pop(table)
    check_shapes(stored, wanted.items())
    yield table, _positions(isqrt(tokens), width)
    yield from stored.items()


def _positions(side: int, width: int) -> npt.NDArray[np.float32]:
    """Return sines and cosines of each patch's column, then of its row [side², width]."""
    import numpy as np  # Local: readers of headers alone do without it.

    each = 1.0 / 10_000.0 ** (np.arange(width // 4) / (width / 4))
    turns = np.outer(np.arange(side), each)
    one = np.concatenate([np.sin(turns), np.cos(turns)], 1)
    rows, columns = np.divmod(np.arange(side**2), side)
    return np.concatenate([one[columns], one[rows]], 1).astype(np.float32)

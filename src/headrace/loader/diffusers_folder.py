"""A folder of one of diffusers' pipelines as a `ModelFiles`, and the weights of its parts.

Without a decoder (`vae`) the latents are pictures in one or three channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.denoising import CausalEncoder, TextEncoder
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..kernels.arrays import floats
from ..models import clip, t5, vae
from ..models.dit import POSITIONS
from ..models.reader import from_hf
from ..models.registry import describe
from ..quant.ggml_types import DENSE
from ..text.clip import in_parts, pad_of
from .encoder_files import check_shapes
from .folder import NO_TEXT, licence_of
from .jsonfile import read_json
from .safetensors_file import StoredTensor
from .shards import find_shards, read_headers
from .weight_source import Named

HIDDEN = -1e30
"""Added to the score of a token that is hidden."""
INDEX, FORMAT = "model_index.json", "diffusers"
STEM = "diffusion_pytorch_model"
"""Beginning of the names of weight files."""
MOST_NAME = 200
"""Maximum letters of a class's name."""
_PIXART = "pixart", "transformer", "PixArtTransformer2DModel", t5.CLASS
PIPELINES: Mapping[str, tuple[str, str, str, str | None, int | None]] = {
    "DiTPipeline": ("dit", "transformer", "DiTTransformer2DModel", None, None),
    "PixArtAlphaPipeline": (*_PIXART, 120),
    "PixArtSigmaPipeline": (*_PIXART, 300),
    "StableDiffusionPipeline": ("unet", "unet", "UNet2DConditionModel", clip.CLASS, None),
}
"""Pipelines → (family, folder of its weights, its class, that of its text encoder or None, most
tokens of a text where its encoder does not say)."""


def open_pipeline(folder: Path, name: str, licence: str | None = None) -> ModelFiles:
    """Read the small files of a pipeline, and the headers of its weights. Raises `ModelFileError`,
    `UnsupportedModel`."""
    index = read_json(folder / INDEX)
    given = index.get("_class_name")
    _expect(INDEX, "_class_name", given, *PIPELINES)
    family, main, named, reader, texts = PIPELINES[str(given)]
    _expect(INDEX, main, _class(index, main), named)
    _expect(INDEX, "vae", _class(index, "vae"), None, vae.CLASS)
    folders = {main: STEM}
    if _class(index, "vae") is not None:
        folders["vae"] = STEM
    tokenizer: Path | dict[str, Any] = NO_TEXT
    if reader is not None:
        _expect(INDEX, "text_encoder", _class(index, "text_encoder"), reader)
        folders["text_encoder"] = "model"
        tokenizer = folder / "tokenizer" / "tokenizer.json"
        if not tokenizer.is_file() and not (reader == clip.CLASS and in_parts(tokenizer)):
            raise ModelFileError(f"{folder}: it lacks tokenizer/tokenizer.json", param="tokenizer")
    configs: dict[str, Any] = {part: read_json(folder / part / "config.json") for part in folders}
    config, pad = configs[main], None
    if reader == clip.CLASS:
        most = configs["text_encoder"].get("max_position_embeddings", 77)
        pad = pad_of(folder / "tokenizer", most)
    _expect("config.json", "_class_name", config.get("_class_name"), named)
    own = {
        "model_type": family, "architectures": [named], "texts": texts, "pad": pad,
        "scheduler": read_json(folder / "scheduler" / "scheduler_config.json"),
        "vae": configs.get("vae"), "text_encoder": configs.get("text_encoder"),
    }  # fmt: skip
    arch = from_hf({**config, **own})
    denoiser = arch.denoiser
    assert denoiser is not None, "it is of the family"
    if denoiser.decoder is None and denoiser.channels not in (1, 3):
        raise UnsupportedModel(
            f"config.json: in_channels is {denoiser.channels}; supported without a decoder: 1, 3",
            param="in_channels",
        )
    if arch.hidden % 4:
        raise UnsupportedModel(
            f"config.json: the width is {arch.hidden}; supported: multiples of 4",
            param="attention_head_dim",
        )
    shards = tuple(
        shard for part, stem in folders.items() for shard in find_shards(folder / part, stem)
    )
    made = ModelFiles(name, FORMAT, folder, shards, arch, tokenizer, None)
    labels = _labels(index.get("id2label"), denoiser.classes)
    return replace(made, licence=licence or licence_of(folder), labels=labels)


def _class(index: Mapping[str, Any], key: str) -> Any:
    """Return the class of a part of a pipeline; None if it has no such part."""
    value = index.get(key)
    return value[-1] if isinstance(value, list) and len(value) == 2 else value


def _expect(where: str, key: str, found: Any, *allowed: str | None) -> None:
    if found not in allowed:
        known = ", ".join(one or "none" for one in allowed)
        raise UnsupportedModel(f"{where}: {key} is {found!r:.80}; supported: {known}", param=key)


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


def _stored(files: ModelFiles, part: str) -> dict[str, StoredTensor]:
    """Return the tensors of a part's folder. Raises `ModelFileError`, `UnsupportedModel`."""
    stored = read_headers(tuple(one for one in files.weights if one.parent.name == part))
    stored.pop("text_model.embeddings.position_ids", None)  # Counts from 0, in older files.
    for name, tensor in stored.items():
        if tensor.dtype not in DENSE:
            raise UnsupportedModel(
                f"{tensor.shard.name}: {name:.100} is {tensor.dtype}; supported: {', '.join(DENSE)}"
            )
    return stored


def denoiser_weights(files: ModelFiles) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight) of every tensor. Raises `ModelFileError`, `UnsupportedModel`."""
    assert files.arch.denoiser is not None
    if files.arch.denoiser.unet is not None:
        yield from _with_kernels(_stored(files, "unet").items())
        return
    stored = _stored(files, "transformer")
    for name, tensor in [*stored.items()]:
        if name.endswith("scale_shift_table"):
            stored[f"{name}.weight"] = replace(stored.pop(name), shape=(1, prod(tensor.shape)))
        elif len(tensor.shape) > 2:  # Convolutions: products with the numbers of a patch.
            stored[name] = replace(tensor, shape=(tensor.shape[0], prod(tensor.shape[1:])))
    wanted, table = describe(files.arch).tensors(), f"{POSITIONS}.weight"
    tokens, width = wanted.pop(table)
    check_shapes(stored, wanted.items())
    yield table, _positions(isqrt(tokens), width, files.arch.denoiser.stretch)
    yield from stored.items()


def decoder_weights(files: ModelFiles) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight) of every tensor of the decoder's graph."""
    found = dict[str, StoredTensor]()
    for name, tensor in _stored(files, "vae").items():
        if name.startswith(("decoder.", "post_quant_conv.")):
            for old, new in _OLD if ".attentions." in name else ():
                name = name.replace(old, new)
            found[name] = tensor
    yield from _with_kernels(found.items())


def _with_kernels(found: Iterable[tuple[str, StoredTensor]]) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight), matrices in place of kernels."""
    for name, tensor in found:
        if len(tensor.shape) < 3:
            yield name, tensor
        elif len(tensor.shape) != 4 or tensor.shape[2] != tensor.shape[3]:
            raise ModelFileError(
                f"{name:.100} is of shape {list(tensor.shape)}, which no kernel has"
            )
        else:  # Kernels [out, in, row, column] as products with rows side by side.
            kernel = tensor.read().transpose(0, *range(2, len(tensor.shape)), 1)
            yield name, kernel.reshape(len(kernel), prod(kernel.shape[1:])).copy()


_OLD = (
    (".query.", ".to_q."), (".key.", ".to_k."), (".value.", ".to_v."),
    (".proj_attn.", ".to_out.0."),
)  # fmt: skip
"""Names of attention's products in older files."""


def text_weights(files: ModelFiles) -> Iterator[tuple[str, Named]]:
    """Yield (name, weight) of every tensor of the text encoder's graph. Raises
    `ModelFileError`."""
    assert files.arch.denoiser is not None
    reads = files.arch.denoiser.reads
    assert reads is not None, "it reads texts"
    stored = _stored(files, "text_encoder")
    if isinstance(reads, CausalEncoder):
        yield t5.GRID, _past(reads)
        yield from ((name.removeprefix("text_model."), one) for name, one in stored.items())
        return
    if (tied := stored.pop("encoder.embed_tokens.weight", None)) is not None:
        stored.setdefault("shared.weight", tied)
    check_shapes(stored, [(t5.TABLE, (reads.buckets, reads.heads))])
    yield t5.GRID, _biases(stored.pop(t5.TABLE), reads)
    yield from stored.items()


def _biases(table: StoredTensor, reads: TextEncoder) -> npt.NDArray[np.float32]:
    """Return T5's bias of each head and distance [heads · 2 · reach]: see `AttentionSpec.reach`."""
    distance, half = np.arange(1 - reads.reach, reads.reach + 1), reads.buckets // 2
    far, near = np.abs(distance), half // 2
    scale = np.log(np.float32(reads.distance / near))
    steps = np.log(np.maximum(far, 1).astype(np.float32) / near) / scale * (half - near)
    bucket = np.where(far < near, far, np.minimum(near + steps.astype(np.int64), half - 1))
    bucket += half * (distance > 0)
    found: npt.NDArray[np.float32] = floats(table.read()).T[:, bucket].reshape(-1)
    return np.ascontiguousarray(found)


def _past(reads: CausalEncoder) -> npt.NDArray[np.float32]:
    """Return a bias of each head and distance that hides the tokens after each: see
    `AttentionSpec.reach`."""
    after = np.arange(1 - reads.reach, reads.reach + 1) > 0
    return np.tile(np.where(after, np.float32(HIDDEN), np.float32(0)), reads.heads)


def _positions(side: int, width: int, stretch: float) -> npt.NDArray[np.float32]:
    """Return sines and cosines of each patch's column, then of its row [side², width]."""
    each = 1.0 / 10_000.0 ** (np.arange(width // 4) / (width / 4))
    turns = np.outer(np.arange(side) / stretch, each)
    one = np.concatenate([np.sin(turns), np.cos(turns)], 1)
    rows, columns = np.divmod(np.arange(side**2), side)
    return np.concatenate([one[columns], one[rows]], 1).astype(np.float32)


PART_WEIGHTS = {"texts": text_weights, "decoder": decoder_weights}
"""Readers of the weights of `models.pipeline.parts_beside`."""

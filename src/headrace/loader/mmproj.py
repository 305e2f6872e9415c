"""An encoder of pictures in a GGUF file next to its language model's (llama.cpp's `mmproj`).

Its metadata (`clip.…`) become the configs that folders have, and its tensors get the names of the
graph. So one reader reads a family. Names and keys are those of llama.cpp's converter (gguf-py,
`constants.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.errors import ModelFileError
from ..base.modelfiles import ModelFiles
from ..base.strings import StringArray
from ..models import gemma_pictures, idefics3
from .gguf import GgufFile
from .gguf_model import PROJECTORS, gguf_of, projector
from .safetensors_file import OpenFile, StoredTensor

_PLAIN = ("F32", "F16", "BF16")
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.(.+)")
_INNER = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_OUTER = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
}
_JOINTS = {
    idefics3.JOINT: "mm.model.fc",
    gemma_pictures.NORM: "mm.soft_emb_norm",
    gemma_pictures.PROJECTION: "mm.input_projection",
}


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """A tensor in blocks of Q8_0, which is decoded when it is read."""

    file: GgufFile
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.tensors[self.name].shape

    def read(self) -> npt.NDArray[np.float32]:
        """Decode: 32 numbers of a byte each after their scale in fp16."""
        blocks = self.file.view(self.name).reshape(-1, 34)
        scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
        numbers: npt.NDArray[np.float32] = blocks[:, 2:].view(np.int8) * scales
        return numbers.reshape(self.shape)


def mmproj_of(files: ModelFiles) -> GgufFile | None:
    """Open the encoder of a GGUF model; None if it has none."""
    more = files.weights[1:] if files.format == "gguf" else ()
    return GgufFile(more[0]) if more else None


def configs(file: GgufFile, files: ModelFiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an encoder's metadata in the form of `config.json` and of a processor's config. Raises
    `ModelFileError`."""
    metadata, (kind, token) = file.metadata, PROJECTORS[projector(file.metadata)]
    if metadata.get("clip.use_gelu") is not True:
        raise ModelFileError(f"{file.path.name}: clip.use_gelu must be true")
    names = {
        "hidden_size": "embedding_length",
        "num_attention_heads": "attention.head_count",
        "num_hidden_layers": "block_count",
        "intermediate_size": "feed_forward_length",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "image_size": "image_size",
        "patch_size": "patch_size",
    }
    vision = {name: _value(file, f"clip.vision.{key}") for name, key in names.items()}
    side, scale = vision["image_size"], metadata.get("clip.vision.projector.scale_factor")
    processing: dict[str, Any] = {
        "image_mean": _value(file, "clip.vision.image_mean"),
        "image_std": _value(file, "clip.vision.image_std"),
    }
    config: dict[str, Any] = {"model_type": kind, "vision_config": vision}
    if kind == "gemma3":
        across = _number(file, vision, "image_size") // _number(file, vision, "patch_size")
        scale = 4 if scale is None else scale
        if not isinstance(scale, int) or not 1 <= scale <= across:
            raise ModelFileError(f"{file.path.name}: the scale factor is {scale!r:.40}")
        config |= {
            "mm_tokens_per_image": (across // scale) ** 2,
            "image_token_index": _token(files, token),
            "boi_token_index": _token(files, gemma_pictures.BEGIN),
            "eoi_token_index": _token(files, gemma_pictures.END),
        }
        return config, {**processing, "size": {"height": side, "width": side}}
    config |= {"image_token_id": _token(files, token), "scale_factor": scale}
    longest = metadata.get("clip.vision.preproc_image_size", side)
    edges = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    return config, {**processing, **edges}


def tensors(file: GgufFile, names: Mapping[str, Any]) -> dict[str, StoredTensor | CodedTensor]:
    """Return the encoder's tensors that the graph needs (`names`), by these names. Raises
    `ModelFileError` for an unsupported type."""
    opened, found = OpenFile(file.path), {}
    for name in names:
        info = file.tensors.get(_name(name))
        if info is None:
            continue
        kind = info.type.name
        if kind not in (*_PLAIN, "Q8_0"):
            raise ModelFileError(
                f"{file.path.name}: {info.name} is {kind}; F32, F16, BF16 and Q8_0 are read"
            )
        found[name] = (
            StoredTensor(file.path, kind, info.shape, info.offset, opened)
            if kind in _PLAIN
            else CodedTensor(file, info.name)
        )
    return found


def _name(name: str) -> str:
    """Return the name in a file of a tensor of the graph."""
    inner, _, last = name.rpartition(".")
    if inner in _JOINTS:
        return f"{_JOINTS[inner]}.{last}"
    for tower in (idefics3.TOWER, gemma_pictures.TOWER):
        if inner.startswith(f"{tower}."):
            rest = inner[len(tower) + 1 :]
            if (layer := _LAYER.fullmatch(rest)) and layer[2] in _INNER:
                return f"v.blk.{layer[1]}.{_INNER[layer[2]]}.{last}"
            return f"{_OUTER.get(rest, rest)}.{last}"
    return name


def _value(file: GgufFile, key: str) -> Any:
    if key not in file.metadata:
        raise ModelFileError(f"{file.path.name} lacks {key}")
    return file.metadata[key]


def _number(file: GgufFile, vision: Mapping[str, Any], key: str) -> int:
    if type(vision[key]) is not int or vision[key] < 1:
        raise ModelFileError(f"{file.path.name}: clip.vision.{key} is {vision[key]!r:.40}")
    return int(vision[key])


def _token(files: ModelFiles, text: str) -> int:
    tokens = gguf_of(files).metadata.get("tokenizer.ggml.tokens")
    found = tokens.find(text) if isinstance(tokens, StringArray) else None
    if found is None:
        raise ModelFileError(f"{files.path.name}: the vocabulary lacks {text}")
    return found

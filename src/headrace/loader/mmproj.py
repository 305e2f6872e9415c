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
from ..kernels.arrays import floats
from ..models import gemma_pictures, idefics3, qwen_vl
from .gguf import GgufFile
from .gguf_model import PROJECTORS, gguf_of, projector
from .safetensors_file import OpenFile, StoredTensor

_PLAIN = ("F32", "F16", "BF16")
_LAYER = re.compile(r"(?:encoder\.layers|blocks)\.(\d+)\.(.+)")
_DEEP = re.compile(r"deepstack_merger_list\.(\d+)\.(?:linear_)?(.+)")
_INNER = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {
    "embeddings.patch_embedding": "v.patch_embd",
    "embeddings.position_embedding": "v.position_embd",
    "post_layernorm": "v.post_ln",
    "patch_embed.proj": "v.patch_embd",
    "pos_embed": "v.position_embd",
    "merger.ln_q": "v.post_ln",
    "merger.norm": "v.post_ln",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
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


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """Tensors of one shape that the graph has as one: of queries, keys and values one below the
    other, or of the frames of a patch, each of which is an array of its own (`axis`)."""

    parts: tuple[StoredTensor | CodedTensor, ...]
    axis: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        first, *rest = self.parts[0].shape
        if self.axis is None:
            return sum(one.shape[0] for one in self.parts), *rest
        shape = [first, *rest]
        return *shape[: self.axis], len(self.parts), *shape[self.axis :]

    def read(self) -> npt.NDArray[np.float32]:
        read = [floats(one.read()) for one in self.parts]
        return np.concatenate(read) if self.axis is None else np.stack(read, self.axis)


Tensor = StoredTensor | CodedTensor | JoinedTensor


def mmproj_of(files: ModelFiles) -> GgufFile | None:
    """Open the encoder of a GGUF model; None if it has none."""
    more = files.weights[1:] if files.format == "gguf" else ()
    return GgufFile(more[0]) if more else None


def configs(file: GgufFile, files: ModelFiles) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an encoder's metadata in the form of `config.json` and of a processor's config. Raises
    `ModelFileError`."""
    metadata, (kind, token) = file.metadata, PROJECTORS[projector(file.metadata)]
    act = {"qwen2_vl": "", "qwen2_5_vl": "clip.use_silu"}.get(kind, "clip.use_gelu")
    if act and metadata.get(act) is not True:
        raise ModelFileError(f"{file.path.name}: {act} must be true")
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
    if kind.startswith("qwen"):
        config["image_token_id"] = _token(files, token)
        vision |= _qwen(file, kind, vision)
        bounds = (1 << 16, 1 << 24) if kind == "qwen3_vl" else (3_136, 12_845_056)
        for key, own in zip(("min_pixels", "max_pixels"), bounds, strict=True):
            processing[key] = metadata.get(f"clip.vision.image_{key}", own)
        return config, processing
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


def _qwen(file: GgufFile, kind: str, vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Qwen-VL encoder's metadata in the words of its own config."""
    metadata = file.metadata
    names = {"depth": "num_hidden_layers", "num_heads": "num_attention_heads"}
    found = {own: vision[name] for own, name in names.items()}
    found["spatial_merge_size"] = metadata.get("clip.vision.spatial_merge_size", 2)
    found["out_hidden_size"] = metadata.get("clip.vision.projection_dim")
    if kind == "qwen2_vl":
        width, up = vision["hidden_size"], file.tensors.get("v.blk.0.ffn_up.weight")
        if up is None or not isinstance(width, int) or width < 1:
            raise ModelFileError(f"{file.path.name} lacks v.blk.0.ffn_up.weight")
        own = {"embed_dim": width, "hidden_size": found["out_hidden_size"]}
        return {**found, **own, "mlp_ratio": up.shape[0] // width}
    if kind == "qwen3_vl":
        table = file.tensors.get("v.position_embd.weight")
        if table is None:
            raise ModelFileError(f"{file.path.name} lacks v.position_embd.weight")
        own = {"num_position_embeddings": table.shape[0], "deepstack_visual_indexes": _deep(file)}
        return found | own
    every = metadata.get("clip.vision.n_wa_pattern")
    if type(every) is not int or every < 1 or type(found["depth"]) is not int:
        raise ModelFileError(f"{file.path.name}: clip.vision.n_wa_pattern is {every!r:.40}")
    whole = [layer for layer in range(min(found["depth"], 128)) if (layer + 1) % every == 0]
    found["window_size"] = metadata.get("clip.vision.window_size", 112)
    return {**found, "fullatt_block_indexes": whole, "hidden_act": "silu"}


def _deep(file: GgufFile) -> list[int]:
    """Return the layers after which a Qwen3-VL encoder makes further rows."""
    layers = file.metadata.get("clip.vision.is_deepstack_layers", [])
    return [layer for layer, one in enumerate(layers if isinstance(layers, list) else []) if one]


def tensors(file: GgufFile, names: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return those of an encoder's tensors that the graph `names`, by these names. Raises
    `ModelFileError` for a type that is not read."""
    opened, deep = OpenFile(file.path), _deep(file)
    found: dict[str, Tensor] = {}
    for name in names:
        own = _name(name, deep)
        parts = [own]
        axis: int | None = None
        if name == f"{qwen_vl.PATCHES}.weight":
            parts, axis = [own, f"{own}.1"], 2
        elif "attn_qkv" in own and own not in file.tensors:
            parts = [own.replace("attn_qkv", f"attn_{letter}") for letter in "qkv"]
        each = [_tensor(file, opened, part) for part in parts]
        there = tuple(part for part in each if part is not None)
        if len(there) == len(parts) and len({part.shape for part in there}) == 1:
            found[name] = there[0] if len(parts) == 1 else JoinedTensor(there, axis)
    return found


def _tensor(file: GgufFile, opened: OpenFile, name: str) -> StoredTensor | CodedTensor | None:
    """Return a tensor of the file; None: it has none of this name."""
    info = file.tensors.get(name)
    if info is None:
        return None
    kind = info.type.name
    if kind not in (*_PLAIN, "Q8_0"):
        raise ModelFileError(
            f"{file.path.name}: {info.name} is {kind}; F32, F16, BF16 and Q8_0 are read"
        )
    if kind in _PLAIN:
        return StoredTensor(file.path, kind, info.shape, info.offset, opened)
    return CodedTensor(file, info.name)


def _name(name: str, deep: list[int]) -> str:
    """Return the name in a file of a tensor of the graph. `deep`: see `_deep`."""
    inner, _, last = name.rpartition(".")
    if inner in _JOINTS:
        return f"{_JOINTS[inner]}.{last}"
    for tower in (idefics3.TOWER, gemma_pictures.TOWER, qwen_vl.TOWER):
        if inner.startswith(f"{tower}."):
            rest = inner[len(tower) + 1 :]
            if (layer := _LAYER.fullmatch(rest)) and layer[2] in _INNER:
                return f"v.blk.{layer[1]}.{_INNER[layer[2]]}.{last}"
            if (merger := _DEEP.fullmatch(rest)) and int(merger[1]) < len(deep):
                return f"v.deepstack.{deep[int(merger[1])]}.{merger[2]}.{last}"
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

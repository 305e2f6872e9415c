"""A draft head on the disk: opened next to its target model, and its weights.

It is a folder with a `config.json` in the format of "speculators" and safetensors; or a further
layer of the model's own safetensors. A matrix over concat(token embedding, hidden state) is split
in two, since no operator concatenates values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..base.errors import ModelFileError, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..models.heads import STATED, HeadArch, head_of, predictor_of
from ..quant.ggml_types import DENSE
from ..quant.schemes import scheme_of
from . import latent_heads
from .content import sampled
from .jsonfile import read_json
from .names import each_expert, from_hf_name, kv_scales
from .safetensors_file import StoredTensor
from .shards import find_shards, read_headers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .weight_source import Named

PREDICTOR = "mtp"
"""Name of the model's own layer that predicts further tokens."""
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Copies of the model's own embedding and output head in such a layer."""


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head, opened but not loaded."""

    name: str
    path: str
    """Path with which a worker opens it again."""
    arch: HeadArch
    tensors: dict[str, StoredTensor]
    """Tensors by the file's names."""

    @property
    def nbytes(self) -> int:
        """Return the size of its weights as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_head(name: str, target: ModelFiles) -> HeadFiles | None:
    """Open the head of this name for `target`; return None if the name is not a head's.

    Raises `ModelFileError` for a damaged head, `UnsupportedModel` for an unsupported one.
    """
    path = Path(name)
    if name == PREDICTOR and not path.exists():
        return _open_predictor(target)
    if not (path / "config.json").is_file():
        return None
    config = read_json(path / "config.json")
    if STATED not in config:
        return None
    _refuse_quantised(config, path.name)
    tensors = read_headers(find_shards(path))
    arch = head_of(config, target.arch, own_head="lm_head.weight" in tensors)
    return HeadFiles(path.name, str(path), arch, _dense(tensors))


def _open_predictor(target: ModelFiles) -> HeadFiles:
    if target.format != "safetensors":
        raise UnsupportedModel("draft_model mtp is read from safetensors, not from a .gguf file")
    config = read_json(target.path / "config.json")
    arch = predictor_of(config, target.arch)
    _refuse_quantised(config, target.path.name)
    at = f"model.layers.{target.arch.layers}."
    tensors = {
        name: tensor
        for name, tensor in read_headers(target.weights).items()
        if name.startswith(at) and not name.endswith(_COPIES)
    }
    if not tensors:
        raise ModelFileError(
            f"{target.path.name} lacks the layer {at[:-1]} that its config says predicts tokens"
        )
    return HeadFiles(PREDICTOR, PREDICTOR, arch, _dense(tensors))


def _refuse_quantised(config: dict[str, object], name: str) -> None:
    if scheme_of(config) is not None:
        raise UnsupportedModel(f"the drafting head of {name} is quantised; supported: dense ones")


def _dense(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    for name in kv_scales(tensors):
        del tensors[name]
    for name, tensor in tensors.items():
        if tensor.dtype not in DENSE and name not in ("d2t", "t2d"):
            raise UnsupportedModel(
                f"{tensor.shard.name}: {name:.100} is {tensor.dtype}; supported: {', '.join(DENSE)}"
            )
    return tensors


def head_weights(files: HeadFiles) -> Iterator[tuple[str, Named]]:
    """Yield (name in the graph of `models.heads`, weight) of every tensor of the head itself."""
    for source, tensor in files.tensors.items():
        name = _named(source, files.arch)
        if name is None:
            continue
        if latent_heads.shapes(name, tensor.shape, files.arch.arch):
            yield from latent_heads.stored(name, tensor, files.arch.arch)
            continue
        for each, part, (expert, row) in each_expert(name, tensor.shape):
            stored = tensor.rows(expert, row, part)
            if _halved(each, files.arch):
                first, second = _columns(stored, 2)
                stem = each.removesuffix(".weight")
                states = stem if files.arch.kind == "eagle3" else f"{stem}.states"
                yield f"{stem}.tokens.weight", first
                yield f"{states}.weight", second
            elif each == "fusion_fc.bias":
                yield "fusion_fc.tokens.bias", stored
            else:
                yield each, stored


def _named(name: str, arch: HeadArch) -> str | None:
    """Return a tensor's name in the graph; None if it is not the head's own, or not needed."""
    if name in ("d2t", "t2d") or (arch.kind == "eagle3" and name.startswith("fc.")):
        return None
    if arch.kind == "mtp":
        layer = ".".join(name.split(".")[:3])
        own = from_hf_name("model.layers.0." + name.removeprefix(f"{layer}."), arch.arch)
        return None if own is None else own.replace("model.layers.0.", "mtp.", 1)
    if name == "embed_tokens.weight":
        return "model.embed_tokens.weight"
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return name


def _halved(name: str, arch: HeadArch) -> bool:
    """Return whether this matrix multiplies concat(token, state)."""
    if arch.kind == "eagle3":
        return name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    return name in ("fusion_fc.weight", "mtp.eh_proj.weight")


def _columns(tensor: StoredTensor, count: int) -> list[npt.NDArray[np.generic]]:
    """Split a matrix into `count` matrices of equal width."""
    import numpy as np  # Local: a reader of headers alone does not pay for it.

    if len(tensor.shape) != 2 or tensor.shape[1] % count:
        raise ModelFileError(
            f"{tensor.shard.name}: a matrix of shape {list(tensor.shape)} is not {count} side by "
            "side"
        )
    return [np.ascontiguousarray(part) for part in np.split(tensor.read(), count, axis=1)]


def tap_name(files: HeadFiles) -> str:
    """Return the name of the products that the head adds to its target. It differs for each file,
    since repacked weights are kept by their names."""
    found = next(iter(files.tensors.values()))
    return f"eagle3.{sampled(found.shard)[2][:16]}.fc"


def tap_weights(files: HeadFiles) -> Iterator[tuple[str, Named]]:
    """Yield (name, matrix) of the products that mix the states of the target's layers, one for each
    layer."""
    stored = files.tensors.get("fc.weight")
    if stored is None or "fc.bias" in files.tensors:
        raise ModelFileError(f"{files.name} must have fc.weight, and no fc.bias")
    name = tap_name(files)
    for place, part in enumerate(_columns(stored, len(files.arch.reads))):
        yield f"{name}.{place}.weight", part


def said_ids(files: HeadFiles) -> npt.NDArray[np.int64] | None:
    """Return the target's token of each of the head's tokens, [vocab]; None: they are the same.

    `d2t` holds the difference from the head's id to the target's. Raises `ModelFileError` if one
    points outside the target's vocabulary.
    """
    import numpy as np  # Local, as above.

    arch, stored = files.arch, files.tensors.get("d2t")
    if stored is None:
        if arch.vocab != arch.arch.vocab_size:
            raise ModelFileError(f"{files.name} lacks d2t, which says what its tokens mean")
        return None
    ids = np.arange(arch.vocab)
    if stored.shape != ids.shape or stored.dtype not in ("I64", "I32"):
        raise ModelFileError(
            f"{files.name}: d2t must be {arch.vocab} whole numbers, not {stored.dtype} "
            f"{list(stored.shape)}"
        )
    found = ids + stored.read().astype(np.int64)
    if found.min() < 0 or found.max() >= arch.arch.vocab_size:
        raise ModelFileError(f"{files.name}: d2t points outside of the model's vocabulary")
    return found

"""The weights of a GGUF file, as host arrays.

GGUF's own changes are undone here. Rows of q and k of llama files are put back into the order of
Hugging Face (pairs i and i + E/2). The 1 that was added to Gemma's norms is subtracted.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.arch import ModelArch
from ..base.errors import ModelFileError, UnsupportedModel
from ..kernels.arrays import floats
from ..kernels.weights import BlockWeight
from ..models.registry import FAMILIES
from ..quant.ggml_types import DENSE, SUPPORTED
from . import latent_heads, row_parts
from .gguf import GgufFile, TensorInfo
from .names import Shapes, check, each_expert, from_gguf_name, no_stack

_FLAT = tuple(
    f".{at}.{name}" for at in ("mamba", "mixer") for name in ("A_log", "D", "norm.weight")
)
"""Vectors that a file stores as matrices."""
Host = npt.NDArray[Any]


def from_gguf(
    file: GgufFile, arch: ModelArch, only: Container[str] | None = None
) -> Iterator[tuple[str, Host | BlockWeight]]:
    """Yield the weights; see `weights.load_weights`. `only`: those of tensors that become one of
    these."""
    names: dict[str, str] = {}
    found: Shapes = {}
    for info in file.tensors.values():
        name = from_gguf_name(info.name, arch)
        if name is None:
            continue
        if info.type.name not in SUPPORTED:
            raise UnsupportedModel(
                f"{file.path.name}: tensor {info.name:.80} is of type {info.type.name}; "
                f"supported: {', '.join(SUPPORTED)}"
            )
        names[info.name] = name
        for each, shape in named(name, info.shape, arch):
            if each in found:
                raise ModelFileError(f"{file.path.name}: {each} appears twice")
            found[each] = shape
    check(found, arch, file.path.name)

    for info in file.tensors.values():
        name = names.get(info.name)
        if name is None:
            continue
        if only is None or any(each in only for each, _ in named(name, info.shape, arch)):
            yield from _load(file, info, name, arch)


def named(
    name: str, shape: tuple[int, ...], arch: ModelArch
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of the tensors that a file's tensor becomes: each of stacked experts and
    heads."""
    heads = latent_heads.shapes(name, shape, arch)
    orders = row_parts.parts(name, shape, arch)
    if heads:
        yield from heads.items()
    elif orders:
        yield from ((each, (len(order), *shape[1:])) for each, order in orders.items())
    elif name.endswith(".shared_expert_gate.weight") and len(shape) == 1:
        yield name, (1, *shape)  # A product of one output is stored as a vector.
    elif name.endswith(_FLAT):
        yield name, (math.prod(shape),)
    elif "*" not in name:
        yield name, shape
    elif ".gate_up_proj." in name:
        # Views of the file: gate above up, of each expert.
        yield from ((each, part) for each, part, _ in each_expert(name, shape))
    else:
        wanted = 2 if name.endswith(".bias") else 3
        if len(shape) != wanted:
            raise no_stack(name, shape, wanted)
        for expert in range(shape[0]):
            yield name.replace("*", str(expert)), shape[1:]


def _load(
    file: GgufFile, info: TensorInfo, name: str, arch: ModelArch
) -> Iterator[tuple[str, Host | BlockWeight]]:
    data = file.view(info.name)
    if FAMILIES[arch.family].names.permuted and (".q_proj." in name or ".k_proj." in name):
        heads = arch.heads if ".q_proj." in name else arch.kv_heads
        data = data[original_rows(heads, arch.head_dim)]
    if name.endswith(".A_log"):
        data = np.log(-floats(data))  # The file has A.
    if offset := norm_offset(name, arch):
        data = floats(data) - np.float32(offset)
    if latent_heads.shapes(name, info.shape, arch):
        yield from latent_heads.of_blocks(name, data, info.type.name, arch)
        return
    orders = row_parts.parts(name, info.shape, arch)
    both = ".gate_up_proj." in name
    for index, (each, shape) in enumerate(named(name, info.shape, arch)):
        part = data[orders[each]] if orders else data
        if "*" in name:
            part = data[index // 2].reshape(2, shape[0], -1)[index % 2] if both else data[index]
        if info.type.name in DENSE:
            yield each, part.reshape(shape)
        elif len(shape) == 2:
            yield each, BlockWeight(info.type.name, part, (shape[0], shape[1]))
        else:
            raise ModelFileError(
                f"{file.path.name}: {info.name:.80} is a vector of type {info.type.name}; "
                "vectors are F32, F16 or BF16"
            )


def original_rows(heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Return, for each row of Hugging Face's order, its row in a llama GGUF [heads · head_dim].

    GGUF keeps the two halves of a rotary pair adjacent (rows 2i and 2i + 1 of a head), as the
    original Llama code did; Hugging Face half a head apart (i and i + E/2).
    """
    rows = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def norm_offset(name: str, arch: ModelArch) -> float:
    """Return the number that a GGUF has added to a canonical weight."""
    shifted = name.endswith("norm.weight") and ".linear_attn." not in name
    return arch.norm_offset if shifted else 0.0


def permuted_rows(heads: int, head_dim: int) -> npt.NDArray[np.int64]:
    """Return the inverse of `original_rows`."""
    return np.argsort(original_rows(heads, head_dim))

"""Yields the weights of a model, one by one in file order, under their canonical names.

Tensors are views of a mapping wherever the file's own order can be kept, so memory grows only
as pages are read. What GGUF changed is changed back here: rows of q and k of llama files are put
back into the order of Hugging Face (pairs i and i + E/2), and the 1 that was added to Gemma's
norms is taken off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from ..base.arch import ModelArch
from ..base.errors import ModelFileError, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..kernels.weights import BlockWeight, Fp8Weight, PackedWeight
from ..quant.checkpoint import LAYOUTS, load, shape_of
from ..quant.ggml_types import DENSE, SUPPORTED
from ..quant.schemes import Scheme, scheme_of
from .gguf import GgufFile, TensorInfo
from .gguf_model import gguf_of
from .jsonfile import read_json
from .names import Shapes, check, expected, from_gguf_name, from_hf_name
from .shards import StoredTensor, read_headers

CODES = {
    "awq": ("I32",),
    "gptq": ("I32",),
    "packed": ("I32",),
    "int8": ("I8",),
    "fp8": ("F8_E4M3",),
}
"""Layout → how safetensors names the type of its codes."""

Loaded = torch.Tensor | BlockWeight | PackedWeight | Fp8Weight


def load_weights(files: ModelFiles) -> Iterator[tuple[str, Loaded]]:
    """(canonical name, weight) of every tensor of the model.

    Raises `ModelFileError` before the first one if a tensor is missing, unknown or of another
    shape than the architecture says, `UnsupportedModel` if its type is not read.
    """
    if files.format == "gguf":
        return _from_gguf(gguf_of(files), files.arch)
    return _from_safetensors(files)


def _from_safetensors(files: ModelFiles) -> Iterator[tuple[str, Loaded]]:
    stored = read_headers(files.weights)
    scheme = scheme_of(read_json(files.path / "config.json"))
    matrices = {} if scheme is None else quantised_matrices(scheme, stored)
    inside = {member for parts in matrices.values() for member in parts.values()}
    names: dict[str, str] = {}
    found: Shapes = {}

    def claim(name: str, source: str, shape: tuple[int, ...]) -> None:
        canonical = from_hf_name(name, files.arch)
        if canonical is None:
            return
        if canonical in found:
            raise ModelFileError(f"{files.path.name}: {canonical} appears twice")
        names[source], found[canonical] = canonical, shape

    for module, parts in matrices.items():
        assert scheme is not None
        shapes = {suffix: stored[member].shape for suffix, member in parts.items()}
        claim(f"{module}.weight", main_of(scheme, parts), shape_of(scheme, shapes, module))
    wanted = expected(files.arch)
    for name, header in stored.items():
        if name.removesuffix(".bias") in matrices and from_hf_name(name, files.arch) not in wanted:
            _check_zero(header.shard, name)
        elif name not in inside:
            claim(name, name, header.shape)
            if name in names and header.dtype not in DENSE:
                raise UnsupportedModel(
                    f"{header.shard.name}: {name:.100} is {header.dtype}; supported: "
                    f"{', '.join(DENSE)}"
                )
    check(found, files.arch, files.path.name)

    with ExitStack() as stack:
        opened = {p: stack.enter_context(safe_open(p, framework="pt")) for p in files.weights}
        packed = {main_of(scheme, parts): m for m, parts in matrices.items()} if scheme else {}
        for shard in files.weights:
            for name in opened[shard].offset_keys():
                if name not in names:
                    continue
                if name not in packed:
                    yield names[name], opened[shard].get_tensor(name)
                    continue
                assert scheme is not None
                parts = matrices[packed[name]]
                tensors = {
                    suffix: opened[stored[member].shard].get_tensor(member)
                    for suffix, member in parts.items()
                }
                yield names[name], load(scheme, tensors, packed[name])


def quantised_matrices(
    scheme: Scheme, stored: Mapping[str, StoredTensor]
) -> dict[str, dict[str, str]]:
    """Module → (suffix → stored name) of every quantised matrix of a checkpoint."""
    layout = LAYOUTS[scheme.layout]
    matrices = {}
    for name, header in stored.items():
        module, _, suffix = name.rpartition(".")
        # In the plain layouts a dense weight has the same suffix but not the same type.
        if suffix == layout.main and header.dtype in CODES[scheme.layout]:
            members = {each: f"{module}.{each}" for each in (layout.main, *layout.others)}
            matrices[module] = {each: full for each, full in members.items() if full in stored}
    return matrices


def _check_zero(shard: Path, name: str) -> None:
    """GPTQ writers add biases of zeros where the model has none: only those may be left out."""
    with safe_open(shard, framework="pt") as file:
        if bool(file.get_tensor(name).any()):
            raise ModelFileError(f"{shard.name}: {name:.100} is a bias that the model has not")


def main_of(scheme: Scheme, parts: Mapping[str, str]) -> str:
    return parts[LAYOUTS[scheme.layout].main]


def _from_gguf(file: GgufFile, arch: ModelArch) -> Iterator[tuple[str, Loaded]]:
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
        for each, shape in _named(name, info.shape):
            if each in found:
                raise ModelFileError(f"{file.path.name}: {each} appears twice")
            found[each] = shape
    check(found, arch, file.path.name)

    for info in file.tensors.values():
        if info.name in names:
            yield from _load(file, info, names[info.name], arch)


def _named(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors that one of the file becomes: stacked experts become one each."""
    if "*" not in name:
        yield name, shape
    else:
        for expert in range(shape[0] if len(shape) == 3 else 0):
            yield name.replace("*", str(expert)), shape[1:]


def _load(
    file: GgufFile, info: TensorInfo, name: str, arch: ModelArch
) -> Iterator[tuple[str, Loaded]]:
    data = torch.from_numpy(file.view(info.name))
    if info.type.name == "BF16":
        data = data.view(torch.bfloat16)
    mapped = True
    if arch.family in ("llama", "mixtral") and (".q_proj." in name or ".k_proj." in name):
        mapped = False
        heads = arch.heads if ".q_proj." in name else arch.kv_heads
        data = data[original_rows(heads, arch.head_dim)]
    if arch.norm_offset and name.endswith("norm.weight"):
        data = data.to(torch.float32) - arch.norm_offset
    for index, (each, shape) in enumerate(_named(name, info.shape)):
        part = data if "*" not in name else data[index]
        if info.type.name in DENSE:
            yield each, part
        elif len(shape) == 2:
            yield each, BlockWeight(info.type.name, part, (shape[0], shape[1]), mapped=mapped)
        else:
            raise ModelFileError(
                f"{file.path.name}: {info.name:.80} is a vector of type {info.type.name}; "
                "vectors are F32, F16 or BF16"
            )


def original_rows(heads: int, head_dim: int) -> torch.Tensor:
    """For each row of Hugging Face's order, its row in a llama GGUF [heads · head_dim].

    GGUF keeps the two halves of a rotary pair side by side (rows 2i and 2i + 1 of a head), as
    the original Llama code did; Hugging Face half a head apart (i and i + E/2).
    """
    rows = torch.arange(heads * head_dim).view(heads, head_dim // 2, 2)
    return rows.transpose(1, 2).reshape(-1)

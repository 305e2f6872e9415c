"""The weights of a folder of safetensors, dense or quantised, as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import safe_open

from ..base.errors import ModelFileError, UnsupportedModel
from ..base.modelfiles import ModelFiles
from ..kernels.weights import Fp8Weight, PackedWeight
from ..models.registry import describe
from ..quant.checkpoint import LAYOUTS, load, shape_of
from ..quant.ggml_types import DENSE
from ..quant.schemes import Scheme, scheme_of
from .jsonfile import read_json
from .names import Shapes, check, from_hf_name
from .shards import StoredTensor, read_headers

CODES = {
    "awq": ("I32",),
    "gptq": ("I32",),
    "packed": ("I32",),
    "int8": ("I8",),
    "fp8": ("F8_E4M3",),
}
"""Layout → how safetensors names the type of its codes."""


def from_safetensors(
    files: ModelFiles,
) -> Iterator[tuple[str, torch.Tensor | PackedWeight | Fp8Weight]]:
    """See `weights.load_weights`."""
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
    wanted = describe(files.arch).tensors()
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

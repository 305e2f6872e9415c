"""Safetensors with their linear layers in fewer bits, in the format of compressed-tensors.

Engines that support compressed-tensors can read it. Embeddings, heads, vectors, routers, image
encoders and all other files of the folder are unchanged.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ..base.arch import ModelArch
from ..base.errors import UnsupportedModel
from ..kernels.arrays import floats
from ..kernels.cpu.encode import LARGEST, bounded
from ..loader.jsonfile import read_json
from ..loader.latent_heads import shapes as latent_parts
from ..loader.names import from_hf_name
from ..loader.row_parts import parts as row_parts
from ..loader.safetensors_file import SIZES, StoredTensor, read_header
from ..loader.sealed import EMPTY, KEY, SHARD, seal
from ..quant.schemes import NVFP4_GROUP
from ..quantise.coded import Coding, stored_as
from ..quantise.folding import ROWS, Factors, activation_error, divided
from ..quantise.rounding import Rounding
from ..quantise.solve import Floats, loss
from ..quantise.statistic import Statistic
from ..quantise.target import Encoded, Stats
from .to_gguf import ROUTER

TARGETS = {
    "int8": Coding("int", 8, "channel"),
    "int4": Coding("int", 4, "group", 128),
    "w8a8": Coding("int", 8, "channel", dynamic="token"),
    "w4a16": Coding("int", 4, "group", 128),
    "w4a16-g64": Coding("int", 4, "group", 64),
    "w4a16-g32": Coding("int", 4, "group", 32),
    "w4a16-asym": Coding("int", 4, "group", 128, symmetric=False),
    "fp8": Coding("float", 8, "channel", dynamic="token"),
    "fp8-tensor": Coding("float", 8, "tensor", dynamic="tensor"),
    "fp8-block": Coding("float", 8, "block", dynamic="group"),
    "nvfp4": Coding("float", 4, "tensor_group", NVFP4_GROUP),
}
GLOBAL = "weight_global_scale"
GROUPS = (128, 64, 32, 16)
"""Inputs that share a 4-bit scale: the largest that divides every row, up to the wanted number."""
LAYER = re.compile(r"\blayers?\.\d+\..*\.weight$")
ELSEWHERE = re.compile("visual|vision|audio|norm|conv|embed", re.IGNORECASE)
"""Names outside the linear layers of the stack."""
IGNORED = ["lm_head", "re:.*(gate|router)$", "re:.*(visual|vision|audio).*"]


@dataclass(frozen=True, slots=True)
class CompressedTensor:
    """A matrix of a shard that becomes several arrays."""

    file_name: str
    stored: StoredTensor
    coding: Coding
    names: tuple[str, ...]
    """Canonical names of its matrices, one below the other."""

    @property
    def matrices(self) -> int:
        return 1

    @property
    def width(self) -> int:
        return self.stored.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * SIZES[dtype] for _, dtype, shape in self.parts)

    @property
    def dense_bytes(self) -> int:
        return self.stored.nbytes

    @property
    def kind(self) -> str:
        return self.coding.format

    def errors(self, number: int, kind: str, inputs: Floats | None) -> Callable[[Any], Floats]:
        """Return a function from rows to the errors [·, in] of rounding them to the nearest.
        `inputs`: Σ x² of each column."""
        data = floats(self.stored.read())
        top = float(np.abs(data).max(initial=0))

        def off(rows: Any) -> Floats:
            w = np.ascontiguousarray(data[rows], np.float32)
            grid = self.coding.fitted(w, inputs, self.stored.dtype, top).grid
            return grid.values(grid.round(w)) - w

        return off

    @property
    def parts(self) -> list[tuple[str, str, list[int]]]:
        """Return (name, type, shape) of each array, in their order."""
        out, width = self.stored.shape
        module = self.file_name.removesuffix("weight")
        found = self.coding.parts(out, width, self.stored.dtype)
        return [(module + suffix, dtype, shape) for suffix, dtype, shape in found]

    def largest(self) -> Floats:
        """Return the largest magnitude of each column; see `quantise.folding`."""
        found: Floats = np.abs(floats(self.stored.read())).max(axis=0).astype(np.float32)
        return found

    def trial(self, factors: Floats, statistic: Statistic) -> float:
        """Return the error of some rows with these column factors; see `quantise.folding`."""
        data = floats(self.stored.read())
        rows = np.linspace(0, len(data) - 1, min(ROWS, len(data))).astype(np.int64)
        w = np.ascontiguousarray(data[rows], np.float32) * factors
        seen, top = divided(statistic, factors), float(np.abs(w).max(initial=0))
        grid = self.coding.fitted(w, seen.gram, self.stored.dtype, top).grid
        error = loss(grid.values(grid.round(w)) - w, seen.gram)
        if self.coding.dynamic is not None:
            error += activation_error(w, seen)
        return error * len(data) / len(rows)

    def encode(self, stats: Stats, factors: Factors | None = None) -> Encoded:
        """Round it; see `quantise.target.Quantisable`."""
        w = (factors or Factors()).of(floats(self.stored.read()))
        top = float(np.abs(w).max(initial=0))
        bounded(top <= LARGEST)
        statistic = next((one for one in stats if one is not None), None)
        rounding = Rounding()
        out, width = w.shape
        suffixes = [name for name, _, _ in self.coding.parts(out, width, self.stored.dtype)]
        found: dict[str, list[npt.NDArray[Any]]] = {}
        for _, some in rounding.slices(w, statistic):
            gram = None if statistic is None else statistic.gram
            fitted = self.coding.fitted(some, gram, self.stored.dtype, top)
            codes, grid = rounding.codes(some, fitted.grid, statistic)
            arrays = {suffixes[0]: self.coding.packed(codes), **fitted.stored(grid)}
            for name, array in arrays.items():
                found.setdefault(name, []).append(array)
        arrays_ = in_order(self.coding, found, suffixes, w.shape)
        said = {"kind": self.coding.format, "weights": w.size, **rounding.errors.said()}
        return arrays_, said


def in_order(
    coding: Coding,
    found: dict[str, list[npt.NDArray[Any]]],
    suffixes: Iterable[str],
    shape: tuple[int, ...],
) -> list[npt.NDArray[Any]]:
    """Return a matrix's arrays by suffix, joined from all slices, in the file's layout."""
    for name in ("weight_scale",) * (coding.strategy == "tensor") + (GLOBAL,):
        if name in found:
            found[name] = found[name][:1]  # There is one for the whole tensor.
    found["weight_shape"] = [np.array(shape, "<i8")]
    return [array for suffix in suffixes for array in found[suffix]]


class Folder:
    """The safetensors files of a model, and their quantised form."""

    def __init__(self, shards: Mapping[str, Path], to: str, arch: ModelArch | None) -> None:
        """Read the headers of `shards`, by name; `arch`: of the model, if it is calibrated on a
        text.

        Raises `ModelFileError`; `UnsupportedModel` if rows of the linear layers have no common
        group.
        """
        self.coding = TARGETS[to]
        self._shards = {name: read_header(path) for name, path in shards.items()}
        linear = {
            name: one
            for stored in self._shards.values()
            for name, one in stored.items()
            if _dense(one) and is_linear(name)
        }
        if self.coding.strategy == "group":
            group = common_group(
                {one.shape[1] for one in linear.values()}, self.coding.group or GROUPS[0]
            )
            self.coding = replace(self.coding, group=group)
        self.tensors = [
            CompressedTensor(name, one, self.coding, _canonical(name, one, arch))
            for name, one in linear.items()
        ]
        self._by_name = {one.file_name: one for one in self.tensors}
        self._arch = arch
        self.factors: Mapping[str, Floats] = {}
        """Numbers by which vectors are divided, by canonical name."""

    @property
    def folds(self) -> bool:
        """Whether factors pay off and are exact: half precision has too small a range for numbers
        scaled by powers of two."""
        return self.coding.folds and all(one.stored.dtype != "F16" for one in self.tensors)

    def write(
        self,
        shard: str,
        out: BinaryIO,
        data_of: Callable[[CompressedTensor], Iterable[npt.NDArray[Any]]],
    ) -> None:
        """Write one file in its quantised form; `data_of` returns the bytes of its new tensors."""
        stored = self._shards[shard]
        write_header(out, (part for name, one in stored.items() for part in self._parts(name, one)))
        for name, one in stored.items():
            new = self._by_name.get(name)
            for part in [self._vector(name, one)] if new is None else data_of(new):
                out.write(np.ascontiguousarray(part).data)
        seal(out, SHARD)

    def index(self) -> bytes:
        """Write the document that maps tensors to files."""
        return index_of(
            {
                shard: [part for name, one in stored.items() for part in self._parts(name, one)]
                for shard, stored in self._shards.items()
            }
        )

    def config(self, path: Path) -> bytes:
        """Write `config.json` with the format of the weights. Raises `ModelFileError`."""
        return config_of(read_json(path), self.coding)

    def _vector(self, name: str, one: StoredTensor) -> npt.NDArray[Any]:
        """Return an unchanged tensor, divided by its factors if it has some."""
        named = self.factors and self._arch and from_hf_name(name, self._arch)
        if not named or named not in self.factors:
            return one.read()
        return stored_as(floats(one.read()) / self.factors[named], one.dtype)[0]

    def _parts(self, name: str, one: StoredTensor) -> Iterator[tuple[str, str, list[int]]]:
        """Yield (name, type, shape) of each array that a tensor becomes."""
        new = self._by_name.get(name)
        if new is None:
            yield name, one.dtype, list(one.shape)
        else:
            yield from new.parts


Part = tuple[str, str, list[int]]
"""Name, type and shape of an array of a shard."""


def write_header(out: BinaryIO, parts: Iterable[Part]) -> None:
    """Write the header of a shard, whose arrays follow in this order, with room for its digest."""
    header: dict[str, Any] = {"__metadata__": {KEY: EMPTY, "format": "pt"}}
    at = 0
    for name, dtype, shape in parts:
        size = math.prod(shape) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)


def index_of(shards: Mapping[str, Sequence[Part]]) -> bytes:
    """Return the document that maps tensors to files."""
    total = sum(
        math.prod(shape) * SIZES[dtype] for parts in shards.values() for _, dtype, shape in parts
    )
    names = {name: shard for shard, parts in shards.items() for name, *_ in parts}
    return as_json({"metadata": {"total_size": total}, "weight_map": names})


def config_of(config: Mapping[str, Any], coding: Coding | None) -> bytes:
    """Return a `config.json` with the format of the linear layers (`coding`; None: dense)."""
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    if coding is not None:
        kept["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": coding.format,
            "quantization_status": "compressed",
            "ignore": IGNORED,
            "config_groups": {"group_0": coding.config()},
        }
    return as_json(kept)


def common_group(widths: set[int], wished: int) -> int:
    """Return the largest group, up to the wanted one, that divides every row."""
    for size in GROUPS:
        if size <= wished and not any(width % size for width in widths):
            return size
    raise UnsupportedModel(
        f"rows of {max(widths)} weights have no group of {GROUPS[-1]}", param="quantise_to"
    )


def _canonical(name: str, one: StoredTensor, arch: ModelArch | None) -> tuple[str, ...]:
    """Return the canonical names of a tensor's matrices that read its columns; the file's name
    without a model."""
    if arch is None:
        return (name,)  # An importance matrix has the file's names.
    canonical = from_hf_name(name, arch)
    if canonical is None:
        return ()
    if latent := latent_parts(canonical, one.shape, arch):
        return tuple(latent)[1::2]  # Those of values; those of keys are transposed.
    return tuple(row_parts(canonical, one.shape, arch)) or (canonical,)


def is_linear(name: str) -> bool:
    """Return whether a matrix of this name is a linear layer of the stack."""
    return bool(LAYER.search(name)) and not (ELSEWHERE.search(name) or ROUTER.search(name))


def _dense(one: StoredTensor) -> bool:
    return len(one.shape) == 2 and one.dtype in ("F32", "F16", "BF16")


def as_json(document: Any) -> bytes:
    return json.dumps(document, indent=2).encode() + b"\n"

"""A GGUF with its dense matrices quantised; the metadata is kept byte for byte.

Vectors, routers and already quantised tensors are unchanged. A file is read piece by piece, and the
same file, text and target give the same bytes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.arch import ModelArch
from ..base.errors import UnsupportedModel
from ..kernels.arrays import floats
from ..kernels.cpu.encode import BLOCKS, encoder
from ..loader import sealed
from ..loader.gguf import DEFAULT_ALIGNMENT, HEAD, MAGIC, GgufFile, TensorInfo
from ..loader.names import from_gguf_name
from ..loader.weights_gguf import named
from ..quant.ggml_types import BY_NAME, DENSE, GgmlType
from ..quantise.blocks import FORMATS
from ..quantise.folding import Factors
from ..quantise.rounding import Rounding
from ..quantise.solve import Floats
from ..quantise.target import Encoded, Stats

ROUTER = re.compile(r"ffn_gate_inp|\.gate\.weight$|router")
"""Matrices that choose experts: small, but a wrong choice costs a whole expert."""
ENDS = ("token_embd.weight", "output.weight")
SHARED = re.compile(r"\.attn_(k|v)\.weight$")
"""Products whose outputs several query heads share: few rows, but much of the loss."""
DOWN = re.compile(r"^blk\.(\d+)\.ffn_down(_exps)?\.weight$")
"""Products back into the residual stream, whose inputs vary most in size."""


@dataclass(frozen=True, slots=True)
class GgufTypes:
    """Types of matrices; the second of each is used if a row is not whole blocks of the first."""

    inner: tuple[str, str]
    ends: tuple[str, str]
    """Types of the embedding and the head, which every token uses."""
    number: int
    """Number of ggml's `general.file_type`."""
    mixed: bool = False
    """Whether K and V of shared heads, and `ffn_down` of half the layers, have the types of
    `ends`."""


_ENDS = "Q6_K", "Q8_0"
TARGETS = {
    "q8_0": GgufTypes(("Q8_0", "Q8_0"), ("Q8_0", "Q8_0"), 7),
    "q6_k": GgufTypes(("Q6_K", "Q8_0"), ("Q6_K", "Q8_0"), 18),
    "q5_k": GgufTypes(("Q5_K", "Q5_0"), _ENDS, 17, mixed=True),
    "q4_k": GgufTypes(("Q4_K", "Q5_0"), _ENDS, 15, mixed=True),
    "q5_0": GgufTypes(("Q5_0", "Q5_0"), _ENDS, 8),
    "q4_0": GgufTypes(("Q4_0", "Q4_0"), _ENDS, 2),
    "iq4_nl": GgufTypes(("IQ4_NL", "IQ4_NL"), _ENDS, 25),
    "mxfp4": GgufTypes(("MXFP4", "MXFP4"), _ENDS, 38),
}
MIX = "mix"
"""Target whose types a budget chooses."""
TARGETS[MIX] = TARGETS["q4_k"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file that becomes blocks of a type."""

    file: GgufFile
    info: TensorInfo
    ggml: GgmlType
    names: tuple[str, ...]
    """Canonical names of its matrices; stacked experts in order."""

    @property
    def file_name(self) -> str:
        return self.info.name

    @property
    def kind(self) -> str:
        return self.ggml.name

    @property
    def width(self) -> int:
        return self.info.shape[-1]

    @property
    def matrices(self) -> int:
        return math.prod(self.info.shape[:-2])

    @property
    def nbytes(self) -> int:
        return self.bytes_as(self.kind)

    @property
    def dense_bytes(self) -> int:
        return self.info.nbytes

    def bytes_as(self, kind: str) -> int:
        """Return its bytes in a type."""
        return math.prod(self.info.shape) // BY_NAME[kind].block * BY_NAME[kind].nbytes

    def errors(self, number: int, kind: str, inputs: Floats | None) -> Callable[[Any], Floats]:
        """Return a function from rows of matrix `number` to the errors [·, in] of rounding them to
        the nearest. `inputs`: Σ x² of each column."""
        data = self.file.view(self.info.name).reshape(self.matrices, *self.info.shape[-2:])[number]

        def off(rows: Any) -> Floats:
            w = floats(data[rows]).astype(np.float32)
            grid = FORMATS[kind].fitted(w, inputs).grid
            return grid.values(grid.round(w)) - w

        return off

    def encode(self, stats: Stats, factors: Factors | None = None) -> Encoded:
        """Round it; see `quantise.target.Quantisable`."""
        data, kind = self.file.view(self.info.name), self.kind
        matrices = data.reshape(-1, *data.shape[-2:])
        rounding, found = Rounding(), []
        each = max(1, len(stats) // len(matrices))
        for number, matrix in enumerate(matrices):
            some = stats[number * each : (number + 1) * each]
            statistic = next((one for one in some if one is not None), None)
            for _, w in rounding.slices(matrix, statistic):
                if statistic is None and kind in BLOCKS:
                    found.append(encoder()(kind, w))
                    continue
                fitted = FORMATS[kind].fitted(w, None if statistic is None else statistic.gram)
                codes, grid = rounding.codes(w, fitted.grid, statistic)
                found.append(FORMATS[kind].pack(codes, fitted.stored(grid)))
        return found, {"kind": kind, "weights": data.size, **rounding.errors.said()}


def tensors(
    file: GgufFile, arch: ModelArch | None, to: str, mix: Mapping[str, str] | None = None
) -> list[GgufTensor]:
    """List the tensors to quantise. `arch`: of the model, if it is calibrated on a text; `mix`:
    types of some tensors, by name, in place of the target's."""
    found, target = [], TARGETS[to]
    layers = 1 + max((int(one[1]) for one in map(DOWN.match, file.tensors) if one), default=0)
    for info in file.tensors.values():
        wide = info.name in ENDS or (target.mixed and _costly(info, layers))
        kind = kind_of(info.name, info.shape, info.type, target.ends if wide else target.inner)
        if mix and kind != info.type:
            kind = BY_NAME[mix.get(info.name, kind.name)]
        if kind == info.type:
            continue
        canonical = None if arch is None else from_gguf_name(info.name, arch)
        # Without a model a matrix has the tensor's name, as in an importance matrix.
        names = (info.name,) * math.prod(info.shape[:-2]) if arch is None else ()
        if canonical is not None and arch is not None:
            names = tuple(name for name, _ in named(canonical, info.shape, arch))
        found.append(GgufTensor(file, info, kind, names))
    return found


def write_gguf(
    file: GgufFile,
    out: BinaryIO,
    to: str,
    made: Iterable[GgufTensor],
    data_of: Callable[[GgufTensor], Iterable[npt.NDArray[Any]]],
) -> None:
    """Write the file with the tensors of `made` in their new types, and its digest; `out` must be
    readable, `data_of` returns the tensors' bytes."""
    new = {one.info.name: one for one in made}
    entries, count = entries_of(file, TARGETS[to].number)
    tensors = []
    for one in file.tensors.values():
        ours = new.get(one.name)
        kind = one.type if ours is None else ours.ggml
        tensors.append(FileTensor(one.name, one.shape, kind, _reader(file, one, ours, data_of)))
    align = file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    write_tensors(out, entries, count, align, tensors)


def _reader(
    file: GgufFile,
    info: TensorInfo,
    made: GgufTensor | None,
    data_of: Callable[[GgufTensor], Iterable[npt.NDArray[Any]]],
) -> Callable[[], Iterable[npt.NDArray[Any]]]:
    return lambda: [file.view(info.name)] if made is None else data_of(made)


class FileTensor(NamedTuple):
    """One tensor of a file to write."""

    name: str
    shape: tuple[int, ...]
    kind: GgmlType
    data: Callable[[], Iterable[npt.NDArray[Any]]]
    """Function that returns its bytes, in order."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.kind.block * self.kind.nbytes


def write_tensors(
    out: BinaryIO, entries: bytes, count: int, align: int, tensors: Sequence[FileTensor]
) -> None:
    """Write a file of `count` metadata entries and tensors, sealed if one is the digest's."""
    head, at = bytearray(MAGIC + struct.pack("<IQQ", 3, len(tensors), count) + entries), 0
    for one in tensors:
        name = one.name.encode()
        head += struct.pack("<Q", len(name)) + name
        head += struct.pack(f"<I{len(one.shape)}Q", len(one.shape), *one.shape[::-1])
        head += struct.pack("<IQ", one.kind.number, at)
        at += _up(one.nbytes, align)
    out.write(head.ljust(_up(len(head), align), b"\0"))
    for one in tensors:
        wrote = sum(out.write(np.ascontiguousarray(part).data) for part in one.data())
        assert wrote == one.nbytes, one.name
        out.write(bytes(_up(wrote, align) - wrote))
    if (place := entries.find(sealed.ENTRY)) >= 0:
        sealed.seal(out, HEAD + place + len(sealed.ENTRY))


def _costly(info: TensorInfo, layers: int) -> bool:
    """Return whether a matrix loses more per byte than others: K and V heads shared by at least
    three query heads, and `ffn_down` of the first and last eighth of the layers and of every third
    between."""
    if SHARED.search(info.name):
        return 3 * info.shape[0] <= info.shape[-1]
    found = DOWN.match(info.name)
    return bool(found) and (
        not layers <= 8 * int(found[1]) < 7 * layers or int(found[1]) % 3 == 2  # type: ignore[index]
    )


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix that can be quantised."""
    matrix = len(shape) >= 2 and name.endswith(".weight") and "norm" not in name
    return matrix and not ROUTER.search(name)


def unfit(file: GgufFile) -> list[str]:
    """List the dense matrices that stay: their rows are not whole blocks of any target. Raises
    `UnsupportedModel` if that is all there is."""
    matrices = [one for one in file.tensors.values() if is_matrix(one.name, one.shape)]
    dense = [one for one in matrices if one.type.name in DENSE]
    found = [one for one in dense if one.shape[-1] % BY_NAME["Q8_0"].block]
    if found and len(found) == len(matrices):
        raise UnsupportedModel(
            f"no row of the model is whole blocks of {BY_NAME['Q8_0'].block} weights: "
            f"{found[0].name} has rows of {found[0].shape[-1]}",
            param="to",
        )
    return [one.name for one in found]


def kind_of(name: str, shape: tuple[int, ...], was: GgmlType, wished: tuple[str, str]) -> GgmlType:
    """Return a tensor's new type; the old one if it is unchanged."""
    if not is_matrix(name, shape) or was.name not in DENSE:
        return was
    fitting = (BY_NAME[one] for one in wished if shape[-1] % BY_NAME[one].block == 0)
    return next(fitting, was)


def entries_of(file: GgufFile, number: int) -> tuple[bytes, int]:
    """Return (metadata with its new type, ggml's block version and room for a digest; number of
    entries)."""
    entries, count = bytearray(file.entries()), len(file.metadata)
    for key, value in (("general.file_type", number), ("general.quantization_version", 2)):
        head = struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", 4)
        at = entries.find(head)
        if at >= 0:
            entries[at + len(head) : at + len(head) + 4] = struct.pack("<I", value)
        elif key not in file.metadata:
            entries += head + struct.pack("<I", value)
            count += 1
    at = entries.find(sealed.ENTRY)
    if at >= 0:
        at += len(sealed.ENTRY)
        entries[at : at + len(sealed.EMPTY)] = sealed.EMPTY.encode()
    else:
        entries += sealed.ENTRY + sealed.EMPTY.encode()
        count += 1
    return bytes(entries), count


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit

"""What unpacks latents, head by head, of files that hold it as one matrix.

`kv_b_proj` [H · (plain + V), rank] has of each head what makes keys, then what makes values. A head
of the model is two matrices: `k_b_proj` [rank, plain], which is transposed, and `v_b_proj`
[V, rank]. New GGUF files hold them so; their type is then kept. Of one matrix in blocks the blocks
of keys lie across, so these become fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.arch import ModelArch
from ..kernels.arrays import floats
from ..kernels.weights import BlockWeight
from .quantised_safetensors import QuantisedMatrix
from .safetensors_file import StoredTensor

WHOLE = ".self_attn.kv_b_proj.weight"
Host = npt.NDArray[Any]


class _Once:
    """One quantised matrix in fp32, read when its first head is taken: all others follow."""

    def __init__(self) -> None:
        self._values: Host | None = None

    def __call__(self, matrix: QuantisedMatrix) -> Host:
        if self._values is None:
            self._values = matrix.values()
        return self._values


@dataclass(frozen=True, slots=True)
class QuantisedHead:
    """The rows of one head of a quantised matrix, in fp32: scales lie across heads."""

    source: QuantisedMatrix
    rows: tuple[int, int]
    reads: _Once = field(compare=False)
    host_dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows[1] - self.rows[0], self.source.shape[1]

    def read(self) -> Host:
        """Its numbers [shape]; raises `ModelFileError`."""
        return self.reads(self.source)[slice(*self.rows)]


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix that is stored as its transposition, to be read when it is taken."""

    source: StoredTensor | QuantisedHead

    @property
    def shape(self) -> tuple[int, ...]:
        """What is read has it."""
        return self.source.shape[::-1]

    @property
    def host_dtype(self) -> str:
        """Type as `kernels.arrays.dtype_name` names it."""
        return self.source.host_dtype

    def read(self) -> Host:
        """Its numbers [shape]; raises `ModelFileError`."""
        return np.ascontiguousarray(self.source.read().T)


def shapes(name: str, shape: tuple[int, ...], arch: ModelArch) -> dict[str, tuple[int, int]]:
    """Name → shape of the matrices of all heads; none where `name` is another tensor's, or its
    shape not the architecture's."""
    mla = arch.mla
    if mla is None or not name.endswith(WHOLE):
        return {}
    if shape != (arch.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank):
        return {}
    at = name.removesuffix("kv_b_proj.weight")
    found = {}
    for head in range(arch.heads):
        found[f"{at}k_b_proj.{head}.weight"] = mla.kv_rank, mla.nope_dim
        found[f"{at}v_b_proj.{head}.weight"] = mla.v_dim, mla.kv_rank
    return found


def stored(
    name: str, tensor: StoredTensor | QuantisedMatrix, arch: ModelArch
) -> Iterator[tuple[str, StoredTensor | QuantisedHead | Transposed]]:
    """The matrices of all heads of a tensor, yet to be read."""
    reads = _Once()
    for each, part, rows in _parts(name, arch):
        if isinstance(tensor, QuantisedMatrix):
            head = QuantisedHead(tensor, rows, reads)
            yield each, Transposed(head) if part == "k" else head
            continue
        (first, behind), row_bytes = rows, tensor.nbytes // tensor.shape[0]
        begin = tensor.begin + first * row_bytes
        own = replace(tensor, shape=(behind - first, tensor.shape[1]), begin=begin)
        yield each, Transposed(own) if part == "k" else own


def of_blocks(name: str, data: Host, kind: str, arch: ModelArch) -> Iterator[tuple[str, Any]]:
    """The matrices of all heads of a GGUF's tensor: dense rows of numbers, or rows of blocks."""
    assert arch.mla is not None
    rank = arch.mla.kv_rank
    for each, part, (first, behind) in _parts(name, arch):
        rows = data[first:behind]
        if data.dtype != np.uint8:
            yield each, np.ascontiguousarray(rows.T) if part == "k" else rows
            continue
        blocks = BlockWeight(kind, rows, (behind - first, rank))
        yield each, _across(blocks) if part == "k" else blocks


def _across(blocks: BlockWeight) -> Host:
    """Its values in fp32, transposed."""
    from ..quant.ggml import dequantise  # Local: it computes on tensors.

    return np.ascontiguousarray(floats(dequantise(blocks)).T)


def _parts(name: str, arch: ModelArch) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(name, "k" or "v", its rows) of each head's matrices."""
    assert arch.mla is not None
    at, row = name.removesuffix("kv_b_proj.weight"), 0
    for head in range(arch.heads):
        for part, rows in (("k", arch.mla.nope_dim), ("v", arch.mla.v_dim)):
            yield f"{at}{part}_b_proj.{head}.weight", part, (row, row + rows)
            row += rows

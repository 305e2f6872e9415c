"""Matrices that unpack latents, split by heads, from files with one matrix for all.

`kv_b_proj` [H · (plain + V), rank] holds for each head the rows of keys, then those of values. A
head of the model has two matrices: `k_b_proj` [rank, plain], which is transposed, and `v_b_proj`
[V, rank]. New GGUF files have this form; then their type is kept. In one matrix of blocks the keys'
blocks lie across the transposed rows, so these become fp32.
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
    """One quantised matrix in fp32, read when its first head is taken, since all others follow."""

    def __init__(self) -> None:
        self._values: Host | None = None

    def __call__(self, matrix: QuantisedMatrix) -> Host:
        if self._values is None:
            self._values = matrix.values()
        return self._values


@dataclass(frozen=True, slots=True)
class QuantisedHead:
    """Rows of one head of a quantised matrix, in fp32: scales lie across heads."""

    source: QuantisedMatrix
    rows: tuple[int, int]
    reads: _Once = field(compare=False)
    host_dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows[1] - self.rows[0], self.source.shape[1]

    def read(self) -> Host:
        """Read its numbers [shape]; raises `ModelFileError`."""
        return self.reads(self.source)[slice(*self.rows)]


@dataclass(frozen=True, slots=True)
class Transposed:
    """Matrix that is stored transposed, read when it is taken."""

    source: StoredTensor | QuantisedHead

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape after transposition."""
        return self.source.shape[::-1]

    @property
    def host_dtype(self) -> str:
        """Return the type as `kernels.arrays.dtype_name` names it."""
        return self.source.host_dtype

    def read(self) -> Host:
        """Read its numbers [shape]; raises `ModelFileError`."""
        return np.ascontiguousarray(self.source.read().T)


def shapes(name: str, shape: tuple[int, ...], arch: ModelArch) -> dict[str, tuple[int, int]]:
    """Return name → shape of the matrices of all heads; empty if `name` is another tensor's, or
    `shape` is not the architecture's."""
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
    """Yield the unread matrices of all heads of a tensor."""
    reads = _Once()
    for each, part, rows in _parts(name, arch):
        if isinstance(tensor, QuantisedMatrix):
            head = QuantisedHead(tensor, rows, reads)
            yield each, Transposed(head) if part == "k" else head
            continue
        (first, end), row_bytes = rows, tensor.nbytes // tensor.shape[0]
        begin = tensor.begin + first * row_bytes
        own = replace(tensor, shape=(end - first, tensor.shape[1]), begin=begin)
        yield each, Transposed(own) if part == "k" else own


def of_blocks(name: str, data: Host, kind: str, arch: ModelArch) -> Iterator[tuple[str, Any]]:
    """Yield the matrices of all heads of a GGUF's tensor: dense rows of numbers, or rows of
    blocks."""
    assert arch.mla is not None
    rank = arch.mla.kv_rank
    for each, part, (first, end) in _parts(name, arch):
        rows = data[first:end]
        if data.dtype != np.uint8:
            yield each, np.ascontiguousarray(rows.T) if part == "k" else rows
            continue
        blocks = BlockWeight(kind, rows, (end - first, rank))
        yield each, _across(blocks) if part == "k" else blocks


def _across(blocks: BlockWeight) -> Host:
    """Return its values in fp32, transposed."""
    from ..quant.ggml import dequantise  # Local: it computes on tensors.

    return np.ascontiguousarray(floats(dequantise(blocks)).T)


def _parts(name: str, arch: ModelArch) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """Yield (name, "k" or "v", its rows) of each head's matrices."""
    assert arch.mla is not None
    at, row = name.removesuffix("kv_b_proj.weight"), 0
    for head in range(arch.heads):
        for part, rows in (("k", arch.mla.nope_dim), ("v", arch.mla.v_dim)):
            yield f"{at}{part}_b_proj.{head}.weight", part, (row, row + rows)
            row += rows

"""Inputs of grouped products: the addresses of a layer's experts, and the rows of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import triton
import triton.language as tl

from ..arrays import tensor
from ..weights import DenseWeight, Fp8Weight, TiledWeight, Weight
from .product_packed import expand

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of rows of a step, each of one expert."""

    listed: torch.Tensor
    """int32 [count · rows]: the assignments of each tile, -1 where it is not full. Not read if
    tiles are single."""
    expert: torch.Tensor
    """int32 [count]: expert of each tile, -1 after the last."""
    assignments: int
    rows: int
    """Rows per tile."""
    experts: int
    single: bool
    """Whether assignment i is the only one of tile i."""

    @property
    def count(self) -> int:
        return self.expert.numel()


@triton.jit
def tile_rows(listed, tile, ROWS: tl.constexpr, SINGLE: tl.constexpr, SHARED: tl.constexpr):
    """Return the assignments of a tile [ROWS] int64 (-1: none), whether there is one, and its row
    of the input, which SHARED assignments have in common."""
    row = tl.arange(0, ROWS)
    found = tl.where(row == 0, tile, -1) if SINGLE else tl.load(listed + tile * ROWS + row)
    found = found.to(tl.int64)
    real = found >= 0
    return found, real, tl.where(real, found, 0) // SHARED


@triton.jit
def matrix_at(addresses, expert, TYPE: tl.constexpr):
    """Return the pointer of an expert's matrix. A fresh allocation is aligned; without this hint
    the compiler loads element by element."""
    return tl.multiple_of(tl.load(addresses + expert).to(tl.pointer_type(TYPE)), 16)


@dataclass(slots=True)
class ExpertTable:
    """Addresses of the matrices of a layer's experts: int64 [experts] for each part."""

    shape: tuple[int, int]
    """(out, in) of every expert."""
    data: torch.Tensor
    scales: torch.Tensor | None = None
    """Scales of fp8 codes, or the pairs of packed ones."""
    factors: torch.Tensor | None = None
    packed: TiledWeight | None = None
    """The first of packed experts, whose form all have; None: not packed."""
    blocked: bool | None = None
    """Whether fp8 has a scale per block or per row; None: not fp8."""
    kept: tuple[Weight, ...] = ()
    """Matrices that only this table keeps alive."""


def expert_table(experts: Sequence[Weight], dtype: torch.dtype) -> ExpertTable:
    """Make the table of weights that `TritonOperators.prepare` made; `dtype`: that of dense
    ones."""
    if len({_form(expert) for expert in experts}) > 1 or _form(experts[0]) is None:
        # Formats mixed among experts, or gate and up quantised apart: rare, so not fast.
        dense = tuple(DenseWeight(_values(expert, dtype)) for expert in experts)
        table = expert_table(dense, dtype)
        table.kept = dense
        return table
    first = experts[0]
    if isinstance(first, DenseWeight):
        return ExpertTable(first.shape, _addresses([_of(e, DenseWeight).data for e in experts]))
    if isinstance(first, Fp8Weight):
        fp8 = [_of(expert, Fp8Weight) for expert in experts]
        return ExpertTable(
            first.shape,
            _addresses([e.data for e in fp8]),
            _addresses([e.scales for e in fp8]),
            blocked=first.blocked,
        )
    tiled = [_of(expert, TiledWeight) for expert in experts]
    return ExpertTable(
        tiled[0].shape,
        _addresses([e.codes for e in tiled]),
        _addresses([e.pairs for e in tiled]),
        _addresses([e.factors for e in tiled]),
        tiled[0],
    )


def _form(weight: Weight) -> tuple[object, ...] | None:
    """Return the properties that experts must have in common; None: no kernel takes it as it is."""
    if isinstance(weight, DenseWeight):
        return ("dense", weight.shape, weight.data.dtype)
    if isinstance(weight, Fp8Weight):
        return ("fp8", weight.shape, weight.scales.shape)
    if isinstance(weight, TiledWeight):
        return ("packed", weight.shape, weight.bits, weight.group, weight.zero)
    return None


def _of(weight: Weight, kind: type[Kind]) -> Kind:
    assert isinstance(weight, kind)
    return weight


def _values(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, DenseWeight):
        return tensor(weight.data).to(dtype)
    if isinstance(weight, Fp8Weight):
        return weight.values().to(dtype)
    if isinstance(weight, TiledWeight):
        return expand(weight, 0, weight.shape[0], dtype)
    parts = getattr(weight, "parts", None)
    assert parts is not None, "a weight that `prepare` did not make"
    return torch.cat([_values(part, dtype) for part in parts])


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    assert all(tensor.is_contiguous() for tensor in tensors)
    # The kernels promise this to the compiler for every matrix; a mapped file need not keep it.
    assert not tensors[0].is_cuda or all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    pointers = [tensor.data_ptr() for tensor in tensors]
    return torch.tensor(pointers, dtype=torch.int64, device=tensors[0].device)


class ExpertTables:
    """Tables of lists of experts, each made once: a layer's lists live as long as the model."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of activations, see `expert_table`."""
        self._dtype = dtype
        self._found: dict[int, ExpertTable] = {}

    def find(self, experts: Sequence[Weight]) -> ExpertTable:
        key = id(experts[0])
        if key not in self._found:
            self._found[key] = expert_table(experts, self._dtype)
        return self._found[key]

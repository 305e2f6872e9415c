"""What a layer is built from: the architecture, the weights, and the operators that will serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..base.arch import ModelArch, Rope
from ..kernels.arrays import Array, address, floats, tensor
from ..kernels.operators import Operators, Role, RopeTable
from ..kernels.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    PackedWeight,
    PanelWeight,
    StackedWeight,
    TiledWeight,
    Weight,
)
from .rope import rope_table
from .source import Matrix, WeightSource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix of the model that operator `linear` takes, and what it was made of."""

    weight: Weight
    names: tuple[str, ...]
    rows: tuple[int, ...]
    """Of each part."""
    width: int


class Builder:
    """Handed down while a model is built, then dropped."""

    def __init__(
        self,
        arch: ModelArch,
        source: WeightSource,
        operators: Operators,
        *,
        device: str,
        dtype: str,
        max_context: int,
    ) -> None:
        self.arch = arch
        self.source = source
        self.operators = operators
        self.device = device
        self.dtype = dtype
        self.max_context = max_context
        self.weight_bytes = 0
        self.products: list[Product] = []
        """Every matrix for `linear`: what adapters can add to."""
        self._seen: set[int] = set()
        self._ropes: dict[Rope, RopeTable] = {}
        self._dequantise = Expansion()

    def vector(self, *names: str, sizes: Sequence[int]) -> Array:
        """Vectors, one after the other, in the model's dtype on its device."""
        parts = [self.source.take_vector(n, s) for n, s in zip(names, sizes, strict=True)]
        vector: Array
        if self.operators.host:
            vector = np.concatenate([floats(part) for part in parts])
        else:
            import torch  # Local, as wherever arrays of the host will do for a CPU.

            dtype = getattr(torch, self.dtype)
            vector = torch.cat([tensor(part).to(self.device, dtype) for part in parts])
        self.weight_bytes += vector.nbytes
        return vector

    def matrix(self, *names: str, rows: Sequence[int], width: int, role: Role) -> Weight:
        """One matrix, or several stacked, in the form that operator `role` takes."""
        parts = tuple(
            self.take(name, rows=count, width=width)
            for name, count in zip(names, rows, strict=True)
        )
        weight = self.prepare(parts[0] if len(parts) == 1 else StackedWeight(parts), role)
        if role == "linear":
            self.products.append(Product(weight, names, tuple(rows), width))
        return weight

    def take(self, name: str, *, rows: int, width: int) -> Matrix:
        """A matrix as the file holds it, on the model's device."""
        return self._place(self.source.take_matrix(name, rows, width))

    def prepare(self, weight: Weight, role: Role) -> Weight:
        prepared = self.operators.prepare(weight, role, self._dequantise)
        for array in weight_arrays(prepared):
            if address(array) not in self._seen:
                self._seen.add(address(array))
                self.weight_bytes += array.nbytes
        return prepared

    def rope(self, rope: Rope) -> RopeTable:
        """The table of a rope, made once for all layers that share it."""
        if rope not in self._ropes:
            table: Sequence[Array] = rope_table(rope, self.arch.head_dim, self.max_context)
            if not self.operators.host:
                table = [tensor(each).to(self.device) for each in table]
            self._ropes[rope] = RopeTable(*table)
        return self._ropes[rope]

    def _place(self, weight: Matrix) -> Matrix:
        if self.operators.host:
            return weight
        if isinstance(weight, DenseWeight | BlockWeight):
            return replace(weight, data=tensor(weight.data).to(self.device))
        if isinstance(weight, PackedWeight):
            offsets = weight.offsets
            return replace(
                weight,
                codes=weight.codes.to(self.device),
                scales=weight.scales.to(self.device),
                offsets=None if offsets is None else offsets.to(self.device),
            )
        return Fp8Weight(weight.data.to(self.device), weight.scales.to(self.device))


class Expansion:
    """`quant` for one model's weights: see `kernels.operators.Dequantise`."""

    def __init__(self) -> None:
        self._last: tuple[BlockWeight, DenseWeight] | None = None

    def __call__(self, weight: BlockWeight, dtype: torch.dtype) -> DenseWeight:
        from ..quant.ggml import dequantise  # Local: it computes on tensors.

        # A tied table is prepared twice in a row, and shared so.
        if self._last is None or self._last[0] is not weight:
            self._last = (weight, DenseWeight(dequantise(weight, dtype)))
        return self._last[1]

    def unpack(self, weight: BlockWeight) -> PackedWeight:
        from ..quant.rows import unpack  # Local, as above.

        return unpack(weight)


def weight_arrays(weight: Weight) -> list[Array]:
    """Every array that a weight is made of."""
    if isinstance(weight, StackedWeight):
        return [array for part in weight.parts for array in weight_arrays(part)]
    if isinstance(weight, DenseWeight | BlockWeight | PanelWeight):
        return [weight.data]
    if isinstance(weight, Fp8Weight):
        return [weight.data, weight.scales]
    if isinstance(weight, TiledWeight):
        return [weight.codes, weight.pairs, weight.factors]
    assert isinstance(weight, PackedWeight)
    extra = [] if weight.offsets is None else [weight.offsets]
    return [weight.codes, weight.scales, *extra]

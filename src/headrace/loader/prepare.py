"""From named weights to a model: each tensor of the graph, in the form of its role."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.absorb import absorbed
from ..base.arch import Rope
from ..base.graph import AttentionSpec, Graph, WeightRef
from ..kernels.arrays import Array, address, floats, tensor
from ..kernels.model import Model
from ..kernels.operators import Operators
from ..kernels.prepared import Prepared, RopeTable
from ..kernels.rope import rope_table
from ..kernels.weights import (
    BlockWeight,
    DenseWeight,
    Fp8Weight,
    LateWeight,
    PackedWeight,
    PanelWeight,
    StackedWeight,
    TiledWeight,
    Weight,
)
from .weight_source import Matrix, WeightSource

if TYPE_CHECKING:
    import torch

    from .upload import Upload


def prepare(
    graph: Graph,
    source: WeightSource,
    operators: Operators,
    *,
    device: str,
    dtype: str,
    max_context: int,
    shared: Prepared | None = None,
) -> Model:
    """Make the model of `graph` from the weights of `source`, which is empty afterwards.

    Weights that `source` lacks are taken from `shared`, another model's for the same operators.
    `device` is the place of vectors and tensors, `dtype` the type of vectors there; rope tables
    reach to `max_context`. Raises `ModelFileError` for a tensor that is missing, misshapen or left
    over.
    """
    graph = absorbed(graph)
    preparing = _Preparing(source, operators, device, dtype, shared or Prepared())
    with ThreadPoolExecutor(1, "headrace-rope") as thread:
        # Cosines do not hold the interpreter lock: they are made at the same time as the weights.
        tables = {key: thread.submit(rope_table, *key, max_context) for key in _rotations(graph)}
        with closing(preparing):
            for ref in _in_order(graph):
                preparing.add(ref)
        source.finish()
        for key, table in tables.items():
            preparing.rope(*key, table.result())
    return Model(graph, preparing.made)


def _rotations(graph: Graph) -> set[tuple[Rope, int]]:
    """Collect (rope, numbers of a head that it rotates), each once for all layers that share it."""
    return {
        (spec.rope, spec.turned)
        for spec in graph.attentions()
        if isinstance(spec, AttentionSpec) and spec.rope is not None
    }


def _in_order(graph: Graph) -> list[WeightRef]:
    """Order the weights by use, but embedding and output head first: a tensor that is both is taken
    once."""
    refs = list(graph.weights())
    ends = [ref for ref in refs if ref.role in ("embed", "logits")]
    return [*ends, *(ref for ref in refs if ref.role not in ("embed", "logits"))]


class _Preparing:
    def __init__(
        self, source: WeightSource, operators: Operators, device: str, dtype: str, shared: Prepared
    ) -> None:
        self.made, self._shared = Prepared(), shared
        self._source, self._operators = source, operators
        self._device, self._dtype = device, dtype
        self._ends: dict[str, Matrix] = {}
        """Embedding and output matrices, by name: a tied table is both."""
        self._seen: set[int] = set()
        self._dequantise = Expansion()
        self._upload: Upload | None = None

    def _send(self, array: Array) -> torch.Tensor:
        if self._device != "cuda":
            found: torch.Tensor = tensor(array).to(self._device)
            return found
        if self._upload is None:
            from .upload import CudaLink, Upload  # Local: it copies tensors.

            self._upload = Upload(CudaLink(self._device))
        return self._upload(array)

    def close(self) -> None:
        if self._upload is not None:
            self._upload.close()

    def add(self, ref: WeightRef) -> None:
        # A head's own table is for the tokens that it reads; its logits are then the target's.
        if ref.key in self._shared.by_key and ref.names[0] not in self._source:
            self.made.by_key[ref.key] = self._shared.by_key[ref.key]
        elif ref.role == "vector":
            self.made.by_key[ref.key] = self._vector(ref)
        elif ref.role in ("moe", "heads"):
            copies = [self._matrix(ref.copy(number)) for number in range(ref.copies)]
            self.made.by_key[ref.key] = copies
        else:
            self.made.by_key[ref.key] = self._matrix(ref)

    def rope(self, rope: Rope, size: int, table: Sequence[Array]) -> None:
        """Set the table of a rope, for all layers that share it."""
        if not self._operators.host:
            table = [tensor(each).to(self._device) for each in table]
        self.made.ropes[rope, size] = RopeTable(*table)

    def _vector(self, ref: WeightRef) -> Array:
        """Take one or several vectors, concatenated, in the model's dtype on its device."""
        parts = [self._source.take_vector(name, *shape) for name, shape in ref.tensors()]
        if ref.width:
            parts = [floats(part).T.reshape(-1) for part in parts]
        vector: Array
        if self._operators.host:
            vector = np.concatenate([floats(part) for part in parts])
        else:
            torch = _torch()
            dtype = getattr(torch, self._dtype)
            vector = torch.cat([tensor(part).to(self._device, dtype) for part in parts])
        self.made.nbytes += vector.nbytes
        return vector

    def _matrix(self, ref: WeightRef) -> Weight:
        """Take one matrix, or several stacked, in the form that the role needs."""
        parts = tuple(
            self._take(name, rows, ref) for name, rows in zip(ref.names, ref.rows, strict=True)
        )
        weight: Weight = parts[0] if len(parts) == 1 else StackedWeight(parts)
        assert ref.role != "vector"
        prepared = self._operators.prepare(weight, ref.role, self._dequantise)
        for array in weight_arrays(prepared):
            if address(array) not in self._seen:
                self._seen.add(address(array))
                self.made.nbytes += array.nbytes
        return prepared

    def _take(self, name: str, rows: int, ref: WeightRef) -> Matrix:
        """Take a matrix in the file's form, on the model's device."""
        if name in self._ends:
            return self._ends[name]
        end = ref.role in ("embed", "logits")
        host = self._operators.host
        late = host and not end
        taken = self._source.take_matrix(name, rows, ref.width, late=late, mapped=host)
        taken = self._place(taken)
        if end:
            self._ends[name] = taken
        else:
            self._ends.clear()  # A head that is not the table is not read again.
        return taken

    def _place(self, weight: Matrix) -> Matrix:
        if self._operators.host or isinstance(weight, LateWeight):
            return weight
        if isinstance(weight, DenseWeight | BlockWeight):
            return replace(weight, data=self._send(weight.data))
        if isinstance(weight, PackedWeight):
            arrays = weight.codes, weight.scales, weight.offsets, weight.order
            codes, scales, offsets, order = (
                None if each is None else self._send(each) for each in arrays
            )
            return replace(weight, codes=codes, scales=scales, offsets=offsets, order=order)
        data, scales = (self._send(each) for each in (weight.data, weight.scales))
        return Fp8Weight(data.view(_torch().float8_e4m3fn), scales)


def _torch() -> Any:
    import torch  # Local: arrays of the host will do for a CPU.

    return torch


class Expansion:
    """Functions of `quant` for one model's weights: see `kernels.operators.Dequantise`."""

    def __init__(self) -> None:
        self._last: tuple[BlockWeight, DenseWeight] | None = None

    def __call__(self, weight: BlockWeight, dtype: torch.dtype) -> DenseWeight:
        from ..quant.ggml import dequantise  # Local: it computes on tensors.

        # A tied table is prepared twice in a row; its values are shared that way.
        if self._last is None or self._last[0] is not weight:
            self._last = (weight, DenseWeight(dequantise(weight, dtype)))
        return self._last[1]

    def unpack(self, weight: BlockWeight) -> PackedWeight:
        from ..quant.rows import unpack  # Local, as above.

        return unpack(weight)


def weight_arrays(weight: Weight) -> list[Array]:
    """List every array of a weight."""
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

"""The pass of a text through one segment, with the statistic of every product's input.

The interpreter runs the nodes over the reference in fp32. Experts are seen because they multiply
through the same operator as all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..base.errors import InvalidRequest
from ..base.graph import Role, Value, WeightRef
from ..kernels.interpret import Interpreter
from ..kernels.operators import Dequantise
from ..kernels.prepared import Prepared
from ..kernels.reference import ReferenceOperators
from ..kernels.weights import DenseWeight, Weight
from ..worker.kv_tensors import allocate_kv
from .batches import batch_of, pool_of
from .segments import MATRICES, GraphSegment
from .solve import Floats
from .statistic import Statistic, Windows


class RecordingOperators(ReferenceOperators):
    """The reference in fp32, which records the input of every product by its weight.

    Products are computed by numpy's library, on whole chunks. A head over the vocabulary is
    recorded and not computed.
    """

    def __init__(self, *, shared: bool = False) -> None:
        """Take whether the experts of a mixture share one statistic."""
        super().__init__(torch.float32)
        self._shared = shared
        self.found: dict[str, Statistic] = {}
        """By a tensor's canonical name; tensors that read the same input share one object."""
        self._names: dict[int, tuple[str, ...]] = {}
        self._last: tuple[object, Statistic | None] = (None, None)

    def prepare(self, weight: Weight, role: Role, dequantise: Dequantise) -> Weight:
        if role == "logits":
            return DenseWeight(torch.empty(0, weight.shape[1]))
        return super().prepare(weight, role, dequantise)

    def watch(self, refs: Sequence[WeightRef], weights: Prepared) -> None:
        """Record the inputs of these products from now on, and forget all others."""
        self.found, self._names, self._last = {}, {}, (None, None)
        for ref in refs:
            if ref.role in ("moe", "heads"):
                each = [ref.copy(number).names for number in range(ref.copies)]
                if self._shared and ref.role == "moe":
                    each = [tuple(name for names in each for name in names)] * ref.copies
                self._names |= zip(map(id, weights.copies(ref)), each, strict=True)
            elif ref.role in MATRICES:
                self._names[id(weights.weight(ref))] = ref.names

    def linear(self, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        self._record(x, weight)
        assert isinstance(weight, DenseWeight)
        # Memory of torch's is aligned: its library sums in an order that depends on that.
        y = torch.empty(len(x), weight.shape[0])
        np.matmul(x.numpy(), weight.data.numpy().T, out=y.numpy())
        return y if bias is None else y.add_(bias)

    def logits(self, x: torch.Tensor, weight: Weight, softcap: float | None) -> torch.Tensor:
        self._record(x, weight)
        return x.new_empty(len(x), 0)

    def _record(self, x: torch.Tensor, weight: Weight) -> None:
        names = self._names[id(weight)]
        known = self.found.get(names[0])
        before, of_before = self._last
        if x is before and (known is None or known is of_before):
            assert of_before is not None
            known = of_before  # Added already.
        else:
            known = known or Statistic.empty(x.shape[1])
            known.add(np.ascontiguousarray(x.numpy()))
        if not np.isfinite(known.top).all():
            raise InvalidRequest(
                f"the text makes numbers in the input of {names[0]} that are not finite; "
                "another text or the model in fp32 is needed",
                param="text",
            )
        self._last = x, known
        self.found.update(dict.fromkeys(names, known))


def run_segment(
    segment: GraphSegment,
    weights: Prepared,
    recording: RecordingOperators,
    windows: Windows,
    values: Mapping[Value, Floats],
    chunk: int,
) -> Iterator[tuple[int, dict[Value, Floats]]]:
    """Run all windows through a segment, `chunk` tokens at a time (one window at least).

    `values`: the segment's inputs [all tokens, width]. Yields (tokens done, the outputs of these
    rows); the statistics are in `recording.found` afterwards. Raises `InvalidRequest` if a number
    is not finite.
    """
    recording.watch(segment.products, weights)
    graph = segment.graph
    outputs = tuple(graph.outputs.values())
    nodes = Interpreter(graph.nodes, weights, outputs)
    first = 0
    for some in _chunks(windows, chunk):
        count = sum(map(len, some))
        rows = slice(first, first + count)
        pool = pool_of(graph, some, "float32")
        with torch.inference_mode():
            given: dict[Value, Any] = {
                value: torch.tensor(values[value][rows]) for value in graph.inputs
            }
            found = nodes.run(recording, batch_of(some, pool), allocate_kv(pool, "cpu"), given)
        first += count
        yield first, {value: one.numpy() for value, one in zip(outputs, found, strict=True)}


def _chunks(windows: Windows, chunk: int) -> Iterator[Windows]:
    some: list[npt.NDArray[np.int64]] = []
    for window in windows:
        if some and sum(map(len, some)) + len(window) > chunk:
            yield some
            some = []
        some.append(window)
    if some:
        yield some

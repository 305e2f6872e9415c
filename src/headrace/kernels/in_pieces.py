"""A part's graph in pieces, from node to node, operator by operator.

`kernels.cpu.pieces` has the same interface over records. Between two pieces other items may run.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..base.graph import Graph, Value
from .arrays import Array
from .interpret import Interpreter
from .operators import KvCache, Operators, StepBatch
from .prepared import Prepared

NOTHING = KvCache([], [])
"""Cache of a part that writes none: bidirectional attention keeps nothing."""


class InPieces(Protocol):
    """Runner of a graph in pieces."""

    def begin(self, batch: StepBatch, *given: Array) -> Any:
        """Return a new item, with the arrays of the graph's inputs."""
        ...

    def run(self, item: Any, last: int) -> None:
        """Run an item's nodes before `last` that have not run."""
        ...

    def rows(self, item: Any, value: Value) -> Array:
        """Return the rows of a value that the last node made; valid until the next run."""
        ...


class _UnderWay:
    def __init__(self, batch: StepBatch, values: dict[Value, Array]) -> None:
        self.batch, self.values, self.at = batch, values, 0


class InterpretedPieces:
    """Runner that keeps an item's values in separate arrays."""

    def __init__(
        self, operators: Operators, graph: Graph, weights: Prepared, cache: KvCache = NOTHING
    ) -> None:
        self._operators, self._inputs, self._cache = operators, graph.inputs, cache
        self._interpreter = Interpreter(graph.nodes, weights, [*graph.outputs.values()])

    def begin(self, batch: StepBatch, *given: Array) -> _UnderWay:
        return _UnderWay(batch, dict(zip(self._inputs, given, strict=True)))

    def run(self, item: _UnderWay, last: int) -> None:
        given = item.batch, self._cache, item.values
        self._interpreter.go_on(self._operators, *given, item.at, last)
        item.at = last

    def rows(self, item: _UnderWay, value: Value) -> Array:
        return item.values[value]

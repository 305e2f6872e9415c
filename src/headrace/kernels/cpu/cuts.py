"""Where a program is cut: nodes that no record computes are called between its records.

So it is with a mixture's `route` and `experts`: which experts a row goes to is known in the step
alone, and there is no kernel for several of them yet. They are computed on tensors, and torch is
imported for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ...base.graph import TOKENS, Graph, Node, Value
from ..arrays import host
from ..interpret import Interpreter
from ..operators import KvCache, Operators, StepBatch
from ..prepared import Prepared

Rooms = Mapping[Value, npt.NDArray[np.float32]]
"""Buffers of the arena by value."""


class Cut:
    """Nodes one behind the other, called before record `at`."""

    def __init__(
        self, at: int, nodes: Sequence[Node], weights: Prepared, given: Rooms, made: Rooms
    ) -> None:
        """`given`: what they read; `made`: what others read of their results."""
        self.at, self._given, self._made = at, given, made
        self._nodes = Interpreter(nodes, weights, list(made))

    def run(self, ops: Operators, batch: StepBatch, cache: KvCache) -> None:
        tokens, samples = len(batch.tokens), len(batch.sample_rows)

        def used(value: Value, room: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
            return room[: tokens if value.rows == TOKENS else samples]

        given = {value: used(value, room) for value, room in self._given.items()}
        found = self._nodes.run(ops, batch, cache, given)
        for (value, room), array in zip(self._made.items(), found, strict=True):
            used(value, room)[:] = host(array)


def borders(graph: Graph, first: int, end: int) -> tuple[list[Value], list[Value]]:
    """Values at the borders of a cut of the nodes from `first` up to `end`: those that it is
    given, and those that it makes for others."""
    nodes = graph.nodes
    inside = [value for node in nodes[first:end] for value in node.out]
    read = dict.fromkeys(value for node in nodes[first:end] for value in node.reads)
    outputs = set(graph.outputs.values())
    made = [
        value
        for value in inside
        if value in outputs or any(reader >= end for reader in graph.readers(value))
    ]
    return [value for value in read if value not in inside], made

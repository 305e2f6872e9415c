"""A part's graph as records that run in pieces, from node to node.

Between two pieces another item may run: then values for later nodes are copied out of the records'
buffers, and back later. Nodes with different numbers of rows (frames, positions) have separate
steps.
"""

from __future__ import annotations

import ctypes
from itertools import groupby
from math import gcd

import numpy as np
import numpy.typing as npt

from ...base.graph import TOKENS, Graph, Value
from ..in_pieces import NOTHING
from ..operators import KvCache, StepBatch
from ..pictured import strip_of
from ..prepared import Prepared
from ..program import Provider
from . import emit
from .arena import Arena
from .fusion import Unrecordable
from .library import Team
from .lowering import Lowering
from .records import ROWS_N, ROWS_R, ROWS_T, HrRecord, HrStep
from .step import fill_step

Floats = npt.NDArray[np.float32]


class PieceItem:
    """An item under way: its step, and the values saved outside of the buffers meanwhile."""

    def __init__(self, batch: StepBatch, values: dict[Value, Floats]) -> None:
        self.units = len(batch.tokens)
        self.step = fill_step(HrStep(), batch)
        self.batch = batch  # Its arrays are read by address.
        self.at = 0
        """First node that has not run."""
        self.values = values


class LoweredPieces:
    """A lowered graph for items of at most `units` units. One caller at a time."""

    def __init__(
        self, team: Team, graph: Graph, weights: Prepared, cache: KvCache, units: int
    ) -> None:
        """Lower the graph. Raises `Unrecordable`."""
        self._team, self._graph = team, graph
        made = [node.out[0].rows.of(units) for node in graph.nodes if node.kind == "conv"]
        self._strip = strip_of(gcd(*made)) if made else 1
        rows = {ROWS_N: units, ROWS_R: 1, ROWS_T: self._strip}
        self._lowering = Lowering(graph, weights, cache, Arena(rows, None, None), {})
        self._records = emit.program(self._lowering.run())
        self._laid: PieceItem | None = None
        """The item whose values are in the buffers."""

    def begin(self, batch: StepBatch, *given: Floats) -> PieceItem:
        """Begin an item with the arrays of the graph's inputs."""
        return PieceItem(batch, dict(zip(self._graph.inputs, given, strict=True)))

    def run(self, item: PieceItem, last: int) -> None:
        """Run an item's nodes before `last` that have not run."""
        self._lay_down(item)
        nodes, ends = self._graph.nodes, self._lowering.ends
        for rows, some in groupby(range(item.at, last), lambda index: nodes[index].out[0].rows):
            indices = list(some)
            first = ends[indices[0] - 1] if indices[0] else 0
            count = ends[indices[-1]] - first
            if count:
                at = ctypes.addressof(self._records) + first * ctypes.sizeof(HrRecord)
                step = item.step if rows == TOKENS else HrStep(n=rows.of(item.units), b=1)
                step.t = self._strip
                self._team.run_at(at, count, ctypes.addressof(step))
        item.at = last
        if last == len(nodes):
            self._laid = None

    def rows(self, item: PieceItem, value: Value) -> Floats:
        """Return the rows of a value, in their buffer, right after its node has run."""
        return self._lowering.floats(value)[: value.rows.of(item.units)]

    def _lay_down(self, item: PieceItem) -> None:
        if self._laid is item:
            return
        if self._laid is not None:
            other = self._laid
            live = self._lowering.live(other.at)
            other.values = {value: self.rows(other, value).copy() for value in live}
        for value, array in item.values.items():
            self.rows(item, value)[:] = array
        item.values, self._laid = {}, item


def pieces_of(
    operators: Provider, graph: Graph, weights: Prepared, units: int, cache: KvCache = NOTHING
) -> LoweredPieces | None:
    """Lower a part, which writes to `cache`, for items of at most `units` units. None: other
    operators serve it, or something in it has no record."""
    team = getattr(operators, "team", None)
    if not isinstance(team, Team) or not operators.host:
        return None
    try:
        return LoweredPieces(team, graph, weights, cache, units)
    except Unrecordable:
        return None

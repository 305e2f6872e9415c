"""A part's graph as records that run in pieces, from node to node.

Between two pieces another item may run: then values for later nodes are copied out of the records'
buffers, and back later. Nodes with different numbers of rows (frames, positions, places at several
sizes of a picture) have separate steps.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from ...base.denoising import strip_of
from ...base.graph import TOKENS, Graph, PictureConvSpec, Rows, Value
from ..arrays import Array, address, host
from ..in_pieces import NOTHING
from ..operators import KvCache, StepBatch, StepLimits
from ..prepared import Prepared
from ..program import CallByCall, Outputs, Provider, Want
from ..ranked import PicturedRows
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
        self._steps: dict[tuple[Rows, int], HrStep] = {}

    def step_of(self, rows: Rows, strip: int) -> HrStep:
        """Return the step of nodes with so many rows; `strip`: rows of a convolution's strips, or
        0."""
        if not strip and (rows == TOKENS or rows.name != TOKENS.name):
            return self.step
        if (rows, strip) not in self._steps:
            count = rows.of(self.units)
            bounds = np.array([0, count], np.int32)
            made = HrStep.from_buffer_copy(self.step)
            made.n, made.b, made.query_starts, made.bounds = count, 1, address(bounds), bounds
            made.t = strip or made.t
            self._steps[rows, strip] = made
        return self._steps[rows, strip]


class LoweredPieces:
    """A lowered graph for items of at most `units` units. One caller at a time."""

    def __init__(
        self,
        team: Team,
        graph: Graph,
        weights: Prepared,
        cache: KvCache,
        units: int,
        texts: int = 1,
    ) -> None:
        """Lower the graph; `texts`: most rows of a text. Raises `Unrecordable`."""
        self._team, self._graph = team, graph
        self._strips = [
            strip_of(node.out[0].rows.of(units)) if node.kind == "conv" else 0
            for node in graph.nodes
        ]
        rows = {ROWS_N: units, ROWS_R: 1, ROWS_T: max(texts, *self._strips)}
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
        nodes, ends, strips = self._graph.nodes, self._lowering.ends, self._strips
        key = [(node.out[0].rows, strip) for node, strip in zip(nodes, strips, strict=True)]
        for (rows, strip), some in groupby(range(item.at, last), key.__getitem__):
            indices = list(some)
            first = ends[indices[0] - 1] if indices[0] else 0
            count = ends[indices[-1]] - first
            if count:
                at = ctypes.addressof(self._records) + first * ctypes.sizeof(HrRecord)
                self._team.run_at(at, count, ctypes.addressof(item.step_of(rows, strip)))
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


class EntryProgram:
    """A denoiser's step whose entries run one after the other: its values have the memory of one
    entry, which has thousands of rows, so that a second one would save no time. See `Program`."""

    host = lowered = True

    def __init__(self, team: Team, plain: CallByCall, limits: StepLimits, units: int) -> None:
        """Lower the step; `units`: rows of an entry. Raises `Unrecordable`."""
        graph, self._plain = plain.model.variant("every"), plain
        self._units, self._texts = units, limits.texts // limits.entries
        given = graph, plain.model.weights, NOTHING, units, self._texts
        self._pieces = LoweredPieces(team, *given)
        self._last, self._output = len(graph.nodes), graph.outputs["hidden"]
        self._hidden = np.zeros((limits.tokens, self._output.width), np.float32)

    def step(self, batch: StepBatch, want: Want) -> Outputs:
        pictured, rows = batch.pictured, len(batch.tokens)
        assert pictured is not None, "the step has no pictures"
        counts, texts = np.diff(host(batch.query_starts)), pictured.text_starts
        beyond = rows > len(self._hidden) or np.diff(texts).max(initial=0) > self._texts
        if beyond or np.any(counts != self._units):
            return self._plain.step(batch, want)
        for entry in range(len(counts)):
            own = slice(entry * self._units, (entry + 1) * self._units)
            item = self._pieces.begin(self._entry(batch, pictured, entry, own))
            self._pieces.run(item, self._last)
            self._hidden[own] = self._pieces.rows(item, self._output)
        made = self._hidden[:rows]
        return Outputs(None, made[:0, :0], made, made)

    def _entry(self, batch: StepBatch, pictured: PicturedRows, entry: int, own: slice) -> StepBatch:
        """Return the step of one of its entries."""
        (first, last), of = pictured.text_starts[entry : entry + 2], slice(entry, entry + 1)
        given = pictured.patches[own], pictured.times[of], pictured.labels[of]
        bounds = np.array([0, last - first], np.int32)
        one = PicturedRows(*given, pictured.texts[first:last], bounds)
        return replace(
            batch,
            tokens=batch.tokens[own],
            positions=batch.positions[own],
            query_starts=np.array([0, self._units], np.int32),
            lengths=batch.lengths[of],
            sample_rows=np.zeros(1, np.int64),
            pictured=one,
        )

    def head(self, hidden: Array) -> Array:
        return self._plain.head(hidden)


def compile_entries(team: Team, plain: CallByCall, limits: StepLimits) -> EntryProgram | None:
    """Lower the step of a denoiser with convolutions, the first of which reads whole entries. None:
    something in it has no record."""
    convolved = (node.spec for node in plain.model.graph.nodes if node.kind == "conv")
    first = next(convolved)
    assert isinstance(first, PictureConvSpec)
    try:
        return EntryProgram(team, plain, limits, first.lines * first.columns)
    except Unrecordable:
        return None

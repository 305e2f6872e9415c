"""Memory of a graph's values, from the record of each to that of its last reader, and the records
so far."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure
from fractions import Fraction
from functools import partial

import numpy as np
import numpy.typing as npt

from ...base.exchange import ExchangeSpec
from ...base.graph import Graph, Value, WindowSpec
from ..arrays import aligned
from ..dealing import Dealing
from ..operators import KvCache
from ..prepared import Prepared
from . import emit, mixture
from .arena import Arena
from .emit import NOT_QUANTISED, Emitted, Matrix, QuantisedRows
from .fusion import Additions, Fusion, Unrecordable, rows_of
from .records import UNIT, HrLinear, HrQuantised


class Placement(Fusion):
    """Memory of the storages that the analysis has found."""

    def __init__(
        self,
        graph: Graph,
        weights: Prepared,
        cache: KvCache,
        arena: Arena,
        additions: Additions,
        dealing: Dealing | None = None,
    ) -> None:
        super().__init__(graph, weights, additions)
        self._cache, self._arena, self._dealing = cache, arena, dealing
        self.names: list[str] = []
        self.emitted: list[Emitted] = []
        self.head: HrLinear | None = None
        """The last product, if it has one part and gives the logits."""
        self.scattered: list[tuple[Structure, int]] = []
        """Records that take rows of other parts, each with its first column of them."""
        self.share: ExchangeSpec | None = None
        """Part of the logits that `head` gives, if ranks share them."""
        self._floats: dict[Value, npt.NDArray[np.float32]] = {}
        """Floats by storage."""
        self._made: dict[Value, npt.NDArray[np.float32]] = {}
        """Floats by storage, also of values that are not read any more."""
        self._codes: dict[Value, QuantisedRows] = {}
        """int8 codes by value, since other numbers in the same storage have other codes."""
        self._idle: list[Callable[[], None]] = []
        """Functions that give back memory of all ranks. This rank has read it; others may still
        read it."""
        self.meetings = 0
        """Exchanges so far."""
        self._met: dict[mixture.Placed, int] = {}
        """Number of exchanges when a mixture's room was last written."""
        self._windows: dict[Value, WindowSpec] = {}
        """Values that are rows side by side of their storage."""
        self.ends: list[int] = []
        """Number of records after each node."""

    def floats(self, value: Value) -> npt.NDArray[np.float32]:
        """Return the memory of a value's numbers, which are there from its record to its last
        reader's."""
        return self._made[self._places[value]]

    def live(self, index: int) -> list[Value]:
        """Return the values in fp32 that records of the nodes from `index` on read, and the results
        of those before."""
        graph = self._graph
        made = [value for node in graph.nodes[:index] for value in node.out]
        return [
            value
            for value in (*graph.inputs, *made)
            if self._places[value] in self._made
            and (
                value in self._results
                or any(self._done_at(reader) >= index for reader in graph.readers(value))
            )
        ]

    def _matrix(self, value: Value) -> Matrix:
        at, stride = emit.matrix(self._floats[self._places[value]])
        spec = self._windows.get(value)
        if spec is not None:
            at, stride = at - 4 * spec.before * stride, spec.stride * stride
        return Matrix(at + 4 * self._first.get(value, 0), stride)

    def _lies_as(self, value: Value, other: Value) -> None:
        """Give a value the columns of its storage that another one has."""
        if other in self._first:
            self._first[value] = self._first[other]
        if other in self._windows:
            self._windows[value] = self._windows[other]

    def _make_floats(self, value: Value) -> Matrix:
        place = self._places[value]
        if place in self._before:
            return self._make_rows_apart(value)
        rows, exchanged = room_of(value), place in self._exchanged
        given = rows, place.width, share_of(value)
        room = self._arena.floats(*given, exchanged=exchanged)
        self._floats[place] = self._made[place] = room
        return self._matrix(value)

    def _make_rows_apart(self, value: Value) -> Matrix:
        """Make rows without gaps, after rows of zeros, in memory that nothing else uses."""
        place = self._places[value]
        before, most = self._before[place], place.rows.of(self._arena.most(rows_of(value)))
        room = aligned((before + most, place.width), np.float32)
        room[:] = 0
        self._floats[place] = self._made[place] = room[before:]
        return self._matrix(value)

    def _make_codes(self, value: Value) -> HrQuantised:
        whole = self._full(value)
        given, exchanged = (room_of(value), whole.width, share_of(value)), whole in self._exchanged
        self._codes[whole] = self._arena.codes(*given, exchanged=exchanged)
        return self._codes[whole].columns(0 if whole is value else self._first[value])

    def _outputs(self, value: Value, *, grain: int) -> tuple[Matrix | None, HrQuantised]:
        """Return the places for the result of a producer that can quantise; `grain`: columns that
        lie in whole units in every rank."""
        codes = NOT_QUANTISED
        if self._wants_codes(value) and grain % UNIT == 0:
            codes = self._make_codes(value)
        floats = None
        if codes is NOT_QUANTISED or self._wants_floats(value):
            floats = self._make_floats(value)
        return floats, codes

    def _emit(self, name: str, emitted: Emitted) -> None:
        self.names.append(name)
        self.emitted.append(emitted)

    def _bury(self, place: Value) -> None:
        buffers: list[tuple[Value, npt.NDArray[np.float32] | QuantisedRows]] = []
        if place in self._floats:
            buffers.append((place, self._floats.pop(place)))
        for value in self._sharing[place]:
            if value in self._codes:
                buffers.append((value, self._codes.pop(value)))
        exchanged = place in self._exchanged
        for value, buffer in buffers:
            given = rows_of(value), value.width, buffer, share_of(value)
            back = partial(self._arena.give_back, *given)
            if exchanged:
                self._idle.append(partial(back, exchanged=True))
            else:
                back()


def room_of(value: Value) -> int:
    """Return the rows of a value in the arena, which has room for those of a step."""
    if value.rows.of(1_000) > 1_000 * share_of(value):
        raise Unrecordable("a value has more rows than the step")
    return rows_of(value)


def share_of(value: Value) -> Fraction:
    """Return the rows of a value for each row of the step, at least those that it has."""
    rows = value.rows
    return Fraction(1 if rows.more else Fraction(rows.times, rows.over))

"""The encoder part of a worker: inputs that are not text, encoded slice by slice.

An item's slices are runs of its graph from node to node. Between two of them only one value is
kept. A complete encoding stays as rows [n, D] until the control plane drops it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.encodings import EncodingName, EncodingStart, SealedHandle
from ..base.errors import EngineFault
from ..base.slices import slices
from ..base.spec import InputSpan
from ..base.step import Admission, StepPlan
from ..dist.payloads import read_payload
from ..kernels.arrays import Array, joined, tensor
from ..kernels.cpu.pieces import pieces_of
from ..kernels.encoded import EncodedRows
from ..kernels.in_pieces import InPieces, InterpretedPieces
from ..kernels.operators import StepBatch
from ..loader.picture_layout import Layout
from ..loader.towers import Tower
from .loading import OpenPart
from .options import Resolved, WorkerOptions
from .part import Part
from .turns import turns_of


@dataclass(slots=True)
class EncodedItem:
    """An encoding in a slot."""

    name: EncodingName
    source: SealedHandle
    units: int
    columns: int
    """`InputSpan.columns`."""
    done: int = 0
    """Slices that are computed."""
    under: Any = None
    """The item as its runner knows it, until all slices are computed."""
    layout: Layout | None = None
    rows: Array | None = None
    """[n, D], once all slices are computed; further outputs of the encoder lie beside the first."""


class Encoder:
    """A loaded encoder part, its items, and the spans of prompts that stand for their rows."""

    def __init__(self, part: Part, tower: Tower, turned: bool) -> None:
        """`turned`: whether the language model's ropes turn by axes (`Rope.axes`)."""
        self.part, self._tower, self._turned = part, tower, turned
        graph = part.model.graph
        self._bounds = slices(graph)
        self._input, self._outputs = graph.inputs[0], list(graph.outputs.values())
        given = part.operators, graph, part.model.weights
        self._run: InPieces = pieces_of(*given, tower.units) or InterpretedPieces(*given)
        self._items: dict[int, EncodedItem] = {}
        self._spans: dict[int, tuple[str, tuple[InputSpan, ...]]] = {}
        """By row of the text part: its tenant, and its inputs."""

    def begin_anew(self) -> None:
        """Forget all items and rows."""
        self._items.clear()
        self._spans.clear()

    def warm_up(self) -> None:
        """Touch every kernel once."""
        units = min(16, self._tower.units)
        rows = np.zeros((self._input.rows.of(units), self._input.width), np.float32)
        layout = None if self._tower.layouts is None else self._tower.layouts(units, 1)
        with self.part.inference():
            item = self._begin(units, layout, rows)
            self._run.run(item, self._bounds[-1])

    def take(self, plan: StepPlan) -> None:
        """Do what a plan says of slots and rows, before anything of it is computed."""
        for slot in plan.dropped:
            self._items.pop(slot, None)
        for start in plan.encodings:
            self._items[start.slot] = _item(start)
        for row in plan.released:
            self._spans.pop(row, None)
        for admission in plan.admitted:
            self._admit(admission)

    def _admit(self, admission: Admission) -> None:
        if admission.spec.inputs:
            self._spans[admission.row] = admission.tenant, admission.spec.inputs

    def run(self, slot: int, first: int, count: int) -> None:
        """Compute slices of an item. Raises `EngineFault` if its input is gone."""
        item = self._items[slot]
        assert item.done == first, "slices are computed in their order"
        with self.part.inference():
            if not first:
                rows = self._read(item)
                if self._tower.layouts is not None:
                    item.layout = self._tower.layouts(item.units, item.columns)
                item.under = self._begin(item.units, item.layout, rows)
            self._run.run(item.under, self._bounds[first + count])
            item.done += count
            if item.done == len(self._bounds) - 1:
                self._finish(item)

    def _begin(self, units: int, layout: Layout | None, rows: Floats) -> Any:
        """Begin a run of the graph over an input."""
        given = [rows, *(layout.given if layout is not None else ())]
        return self._run.begin(self._batch(units, layout), *map(self.part.activations, given))

    def _finish(self, item: EncodedItem) -> None:
        """Take the rows of an item whose slices are computed, in the order of the prompt."""
        made = [self._run.rows(item.under, output) for output in self._outputs]
        rows = made[0] if len(made) == 1 else joined(made, 1)
        if item.layout is not None and item.layout.back is not None:
            rows = rows[item.layout.back]
        own = isinstance(rows, np.ndarray) and rows.base is not None
        item.rows, item.under, item.layout = rows.copy() if own else rows, None, None

    def _read(self, item: EncodedItem) -> Floats:
        source, rows = item.source, self._input.rows.of(item.units)
        if (source.rows, source.width) != (rows, self._input.width):
            raise EngineFault(
                f"the input has {source.rows} rows of {source.width} numbers, not {rows} of "
                f"{self._input.width}"
            )
        return read_payload(source)

    def _batch(self, units: int, layout: Layout | None) -> StepBatch:
        """Return the step of one entry of `units` rows, which attend to each other."""
        positions = np.arange(units)
        arrays = [positions, positions, np.array([0, units], np.int32), _int32(units), _NONE]
        further: list[Array | None] = [None, None]
        if layout is not None:
            further = [layout.turns, layout.windows]
        if not self.part.operators.host:
            arrays = [tensor(each) for each in arrays]
            further = [None if each is None else tensor(each) for each in further]
        tokens, places, bounds, lengths, sampled = arrays
        made = StepBatch(tokens, places, bounds, lengths, [], sampled, units, units)
        made.turns, made.windows = further
        return made

    def turns_of(self, plan: StepPlan) -> npt.NDArray[np.int64] | None:
        """Return `StepBatch.turns` of a step of the text part."""
        if not self._turned or self._spans.keys().isdisjoint(plan.rows):
            return None
        spans = [self._spans.get(row, ("", ()))[1] for row in plan.rows]
        given = zip(spans, plan.starts, plan.counts, strict=True)
        return np.concatenate([turns_of(*each) for each in given], 1)

    def rows_of(self, plan: StepPlan) -> EncodedRows | None:
        """Return the rows of encodings in a step of the text part, for `StepBatch.encoded`."""
        if self._spans.keys().isdisjoint(plan.rows):
            return None
        known = {item.name: item.rows for item in self._items.values()}
        places: list[npt.NDArray[np.int64]] = []
        found: list[Array] = []
        begin = 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            tenant, spans = self._spans.get(row, ("", ()))
            for span in spans:
                low, high = max(span.first, start), min(span.first + span.length, start + count)
                if low < high:
                    rows = known.get(EncodingName(tenant, span.digest))
                    assert rows is not None, "a chunk stops before what is not encoded yet"
                    places.append(np.arange(low, high) + (begin - start))
                    found.append(rows[low - span.first : high - span.first])
            begin += count
        if not places:
            return None
        at = np.concatenate(places)
        rows = joined(found, 0)
        return EncodedRows(at if isinstance(rows, np.ndarray) else tensor(at).to(rows.device), rows)


def load_encoder(
    opened: OpenPart, options: WorkerOptions, resolved: Resolved, text: Part
) -> Encoder:
    """Load the encoder of a model, which uses the threads of `text`. Its weights stay as the files
    have them: `quantise` is about the language model."""
    _, graph, source, tower = opened
    assert tower is not None, "an encoder comes with its tower"
    part = Part(
        graph, source, replace(options, quantise="auto"), resolved, tower.units, beside=text
    )
    ropes = [getattr(spec, "rope", None) for spec in text.model.graph.attentions()]
    return Encoder(part, tower, any(rope is not None and rope.axes for rope in ropes))


def _item(start: EncodingStart) -> EncodedItem:
    return EncodedItem(start.name, start.source, start.units, start.columns)


def _int32(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


Floats = npt.NDArray[np.float32]
_NONE = np.zeros(0, np.int64)

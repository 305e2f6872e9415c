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
from ..base.slices import most_units, slices
from ..base.spec import InputSpan
from ..base.step import Admission, StepPlan
from ..dist.payloads import read_payload
from ..kernels.arrays import Array, joined, tensor
from ..kernels.cpu.pieces import pieces_of
from ..kernels.encoded import EncodedRows
from ..kernels.in_pieces import InPieces, InterpretedPieces
from ..kernels.operators import StepBatch
from .loading import OpenPart
from .options import Resolved, WorkerOptions
from .part import Part


@dataclass(slots=True)
class EncodedItem:
    """An encoding in a slot."""

    name: EncodingName
    source: SealedHandle
    units: int
    done: int = 0
    """Slices that are computed."""
    under: Any = None
    """The item as its runner knows it, until all slices are computed."""
    rows: Array | None = None
    """[n, D], once all slices are computed."""


class Encoder:
    """A loaded encoder part, its items, and the spans of prompts that stand for their rows."""

    def __init__(self, part: Part) -> None:
        self.part = part
        graph = part.model.graph
        self._bounds = slices(graph)
        (self._input,), (self._output,) = graph.inputs, graph.outputs.values()
        given = part.operators, graph, part.model.weights
        self._run: InPieces = pieces_of(*given, most_units(graph)) or InterpretedPieces(*given)
        self._items: dict[int, EncodedItem] = {}
        self._spans: dict[int, tuple[str, tuple[InputSpan, ...]]] = {}
        """By row of the text part: its tenant, and its inputs."""

    def begin_anew(self) -> None:
        """Forget all items and rows."""
        self._items.clear()
        self._spans.clear()

    def warm_up(self) -> None:
        """Touch every kernel once."""
        units = min(16, most_units(self.part.model.graph))
        rows = np.zeros((self._input.rows.of(units), self._input.width), np.float32)
        with self.part.inference():
            item = self._run.begin(self._batch(units), self.part.activations(rows))
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
                item.under = self._run.begin(self._batch(item.units), self._read(item))
            self._run.run(item.under, self._bounds[first + count])
            item.done += count
            if item.done == len(self._bounds) - 1:
                rows = self._run.rows(item.under, self._output)
                item.rows, item.under = rows.copy() if isinstance(rows, np.ndarray) else rows, None

    def _read(self, item: EncodedItem) -> Array:
        source, rows = item.source, self._input.rows.of(item.units)
        if (source.rows, source.width) != (rows, self._input.width):
            raise EngineFault(
                f"the input has {source.rows} rows of {source.width} numbers, not {rows} of "
                f"{self._input.width}"
            )
        return self.part.activations(read_payload(source))

    def _batch(self, units: int) -> StepBatch:
        """Return the step of one entry of `units` rows, which attend to each other."""
        positions = np.arange(units)
        arrays = [positions, positions, np.array([0, units], np.int32), _int32(units), _NONE]
        if not self.part.operators.host:
            arrays = [tensor(each) for each in arrays]
        tokens, places, bounds, lengths, sampled = arrays
        return StepBatch(tokens, places, bounds, lengths, [], sampled, units, units)

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
    _, graph, source = opened
    own = replace(options, quantise="auto")
    return Encoder(Part(graph, source, own, resolved, most_units(graph), beside=text))


def _item(start: EncodingStart) -> EncodedItem:
    return EncodedItem(start.name, start.source, start.units)


def _int32(*numbers: int) -> npt.NDArray[np.int32]:
    return np.array(numbers, np.int32)


_NONE = np.zeros(0, np.int64)

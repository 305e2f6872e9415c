"""The encoder part of a worker: inputs that are not text, encoded slice by slice.

An item's slices are runs of its graph from node to node. Between two of them only one value is
kept. A complete encoding stays until the control plane drops it: as rows [n, D], or in the blocks
of its slot if texts attend to it (`cross`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.encodings import EncodingName, EncodingStart, SealedHandle
from ..base.errors import EngineFault
from ..base.modelfiles import ModelFiles
from ..base.slices import slices
from ..base.spec import InputSpan
from ..base.step import Admission, PoolShape, StepPlan
from ..dist.payloads import read_payload
from ..kernels.arrays import Array, joined, tensor
from ..kernels.backend import Shelf
from ..kernels.encoded import EncodedRows
from ..kernels.in_pieces import NOTHING, InPieces
from ..kernels.operators import KvCache, StepBatch
from ..loader.picture_layout import Layout, of_frames
from ..loader.towers import Tower
from .cross import CrossBlocks, Floats
from .items import one_entry, run_in_slices
from .loading import OpenPart
from .options import Resolved, WorkerOptions
from .part import Part
from .turns import reach_of, turns_of


@dataclass(slots=True)
class EncodedItem:
    """An encoding in a slot."""

    slot: int
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
    """[n, D], once all slices are computed: further outputs of the encoder lie beside the first.
    None if it is in blocks."""
    aligns: bool = False
    keys: dict[int, Floats] = field(default_factory=dict)
    """K [n, D] in fp32 by aligned layer, of an item that is to be aligned."""


class Encoder:
    """A loaded encoder part, its items, and the spans of prompts that stand for their rows."""

    def __init__(
        self, part: Part, tower: Tower, *, turned: bool = False, cross: CrossBlocks | None = None
    ) -> None:
        """`turned`: whether the language model's ropes turn by axes (`Rope.axes`). `cross`: the
        blocks of encodings that texts attend to."""
        self.part, self.cross = part, cross
        self._tower, self._turned = tower, turned
        graph = part.model.graph
        self._bounds = slices(graph)
        self._input, self._outputs = graph.inputs[0], list(graph.outputs.values())
        self._run: InPieces
        self._items: dict[int, EncodedItem] = {}
        self._named: dict[EncodingName, EncodedItem] = {}
        self._spans: dict[int, tuple[str, tuple[InputSpan, ...]]] = {}
        """By row of the text part: its tenant, and its inputs."""

    def bind(self, pool: PoolShape, cache: KvCache) -> None:
        """Take the blocks of the text part's cache, and forget all items and rows. Only now are the
        weights where they stay: a shelf moves them at the end of loading."""
        self.forget()
        read = NOTHING if self.cross is None else self.cross.bind(pool, cache, self.part)
        self._run = run_in_slices(self.part, self._tower.units, read)

    def forget(self) -> None:
        """Forget all items and rows."""
        self._items.clear()
        self._named.clear()
        self._spans.clear()

    def across(self, plan: StepPlan, batch: StepBatch) -> StepBatch:
        """Return the tokens of a step of the text part as they attend to encodings, for
        `StepBatch.across`. A row without one, of a step that nobody reads, has any."""
        assert self.cross is not None
        read = []
        for row in plan.rows:
            item = self._item_of(row)
            read.append((0, 1) if item is None else (item.slot, item.units))
        return self.cross.reading(batch, read)

    def keys(self, row: int) -> dict[int, Floats]:
        """Return K of the input of a row of the text part, by aligned layer."""
        item = self._item_of(row)
        assert item is not None, "an input is complete before its texts are computed"
        return item.keys

    def _item_of(self, row: int) -> EncodedItem | None:
        tenant, spans = self._spans.get(row, ("", ()))
        return self._named[EncodingName(tenant, spans[0].digest)] if spans else None

    def warm_up(self) -> None:
        """Touch every kernel once."""
        units = min(16, self._tower.units)
        rows = np.zeros((self._input.rows.of(units), self._input.width), np.float32)
        layout = None if self._tower.layouts is None else self._tower.layouts(units, 1)
        with self.part.inference():
            item = self._begin(units, layout, rows, 0)
            self._run.run(item, self._bounds[-1])

    def take(self, plan: StepPlan) -> None:
        """Do what a plan says of slots and rows, before anything of it is computed."""
        for slot in plan.dropped:
            item = self._items.pop(slot, None)
            if item is not None and self._named.get(item.name) is item:
                del self._named[item.name]
        for start in plan.encodings:
            self._items[start.slot] = self._named[start.name] = _item(start)
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
                item.under = self._begin(item.units, item.layout, rows, slot)
            if item.aligns and self.cross is not None:
                for node, layer, value in self.cross.aligned:
                    if self._bounds[first] <= node < self._bounds[first + count]:
                        self._run.run(item.under, node)
                        item.keys[layer] = self.cross.keys_in(self._run.rows(item.under, value))
            self._run.run(item.under, self._bounds[first + count])
            item.done += count
            if item.done == len(self._bounds) - 1:
                self._finish(item)

    def _begin(self, units: int, layout: Layout | None, rows: Floats, slot: int) -> Any:
        """Begin a run of the graph over an input."""
        given = [rows, *(layout.given if layout is not None else ())]
        return self._run.begin(self._batch(units, layout, slot), *map(self.part.activations, given))

    def _finish(self, item: EncodedItem) -> None:
        """Take the rows of an item whose slices are computed, in the order of the prompt, unless
        they are in blocks."""
        if self.cross is not None:
            item.under = None
            return
        made = [self._run.rows(item.under, output) for output in self._outputs]
        rows = made[0] if len(made) == 1 else joined(made, 1)
        if item.layout is not None and item.layout.back is not None:
            rows = rows[item.layout.back]
        own = isinstance(rows, np.ndarray) and rows.base is not None
        item.rows, item.under, item.layout = rows.copy() if own else rows, None, None

    def _read(self, item: EncodedItem) -> Floats:
        source, rows, width = item.source, self._input.rows.of(item.units), self._input.width
        widths = {width, width // self._tower.frames}
        if source.rows != rows or source.width not in widths:
            raise EngineFault(
                f"the input has {source.rows} rows of {source.width} numbers, not {rows} of {width}"
            )
        found = read_payload(source)
        return found if source.width == width else of_frames(found, width)

    def _batch(self, units: int, layout: Layout | None, slot: int) -> StepBatch:
        """Return the step of one entry of `units` rows, which attend to each other."""
        if self.cross is not None:
            return self.cross.writing(units, slot)
        made = one_entry(self.part, np.arange(units))
        if layout is not None:
            given: tuple[Array | None, ...] = layout.turns, layout.windows
            if not self.part.operators.host:
                given = tuple(None if each is None else tensor(each) for each in given)
            made.turns, made.windows = given
        return made

    def turns_of(self, plan: StepPlan) -> npt.NDArray[np.int64] | None:
        """Return `StepBatch.turns` of a step of the text part."""
        if not self._turned or self._spans.keys().isdisjoint(plan.rows):
            return None
        spans = [self._spans.get(row, ("", ()))[1] for row in plan.rows]
        given = zip(spans, plan.starts, plan.counts, strict=True)
        return np.concatenate([turns_of(*each) for each in given], 1)

    def reach_of(self, plan: StepPlan) -> npt.NDArray[np.int64] | None:
        """Return `StepBatch.reach` of a step of the text part."""
        if self._spans.keys().isdisjoint(plan.rows):
            return None
        spans = [self._spans.get(row, ("", ()))[1] for row in plan.rows]
        given = list(zip(spans, plan.starts, plan.counts, strict=True))
        found = [reach_of(*each) for each in given]
        if all(one is None for one in found):
            return None
        pairs = zip(found, given, strict=True)
        return np.concatenate(
            [np.arange(at, at + n) if one is None else one for one, (_, at, n) in pairs]
        )

    def rows_of(self, plan: StepPlan) -> EncodedRows | None:
        """Return the rows of encodings in a step of the text part, for `StepBatch.encoded`."""
        if self.cross is not None or self._spans.keys().isdisjoint(plan.rows):
            return None
        places: list[npt.NDArray[np.int64]] = []
        found: list[Array] = []
        begin = 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            tenant, spans = self._spans.get(row, ("", ()))
            for span in spans:
                low, high = max(span.first, start), min(span.end, start + count)
                if low < high:
                    at = np.arange(low, high)
                    read = at - span.first
                    if span.parted:
                        line, column = np.divmod(read, span.columns + 1)
                        own = column < span.columns
                        at, read = at[own], (read - line)[own]
                    if not len(at):
                        continue
                    item = self._named.get(EncodingName(tenant, span.digest))
                    rows = None if item is None else item.rows
                    assert rows is not None, "a chunk stops before what is not encoded yet"
                    places.append(at + (begin - start))
                    found.append(rows[read] if span.parted else rows[read[0] : read[-1] + 1])
            begin += count
        if not places:
            return None
        at = np.concatenate(places)
        rows = joined(found, 0)
        return EncodedRows(at if isinstance(rows, np.ndarray) else tensor(at).to(rows.device), rows)


def load_encoder(
    opened: OpenPart,
    options: WorkerOptions,
    resolved: Resolved,
    text: Part,
    shelf: Shelf | None = None,
) -> Encoder:
    """Load the encoder of a model, which uses the threads of `text`. Its weights stay as the files
    have them, unless `quantise` asks for eight bits: fewer are of the language model alone."""
    files, graph, source, tower, _ = opened
    assert tower is not None, "an encoder comes with its tower"
    kinds = source.kinds()
    cross = files.arch.cross if isinstance(files, ModelFiles) else None
    eight = options.quantise == "int8" and cross is None
    own = replace(options, quantise="int8" if eight else "auto")
    part = Part(graph, source, own, resolved, tower.units, shelf=shelf, beside=text)
    if isinstance(files, ModelFiles) and cross is not None:
        return Encoder(part, tower, cross=CrossBlocks(files.arch, graph, "Q8_0" in kinds))
    ropes = [getattr(spec, "rope", None) for spec in text.model.graph.attentions()]
    turned = any(rope is not None and rope.axes for rope in ropes)
    return Encoder(part, tower, turned=turned)


def _item(start: EncodingStart) -> EncodedItem:
    given = start.slot, start.name, start.source, start.units, start.columns
    return EncodedItem(*given, aligns=start.aligns)

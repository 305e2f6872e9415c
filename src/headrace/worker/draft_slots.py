"""A part that drafts: its KV in slots, which the control plane gives to rows, and its tables.

A slot has room for one sequence. Its index i is a place of the slot's own tables, whose tokens and
sampling parameters are copies of its row's. A row without a slot is not drafted for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..base.groups import graph_groups, slot_groups
from ..base.step import BlockWrite, DraftCosts, Drafting, GroupShape, PoolShape, SlotWrite, StepPlan
from ..kernels.arrays import Array
from ..kernels.operators import StepBatch, StepLimits
from ..kernels.program import BEST, Outputs, Want, want
from .host_batch import HostBatches
from .loading import READ
from .options import WorkerOptions
from .part import Part
from .rows import BlockTables, Rows

BLOCK = 16
"""Tokens of a page of a slot."""


@dataclass(slots=True)
class Slot:
    number: int
    computed: int = 0
    """Number of indices whose keys and values lie in the slot."""


T = TypeVar("T", bound=Slot)


class DraftPart(ABC, Generic[T]):
    """A part that drafts.

    Load it, `bind` it to the tables of an allocated worker, `clear` it when a step begins and
    `take` the slots of its plan. Then `settle` each row and ask whether it is `ready`, `draft`, and
    `read` what was not ready. Calls come from the worker's thread.
    """

    together: int
    """Tokens of a row that are read with its first draft, at most."""
    drawn: Want
    """Outputs from which tokens are drawn by the rules of rows."""
    _types: Array | None = None
    """`StepBatch.types` of the largest step, if its graph reads them."""

    def __init__(self, part: Part, options: WorkerOptions, share: float) -> None:
        """`share`: cost of one more draft of each row as a share of a step, by the bytes read."""
        self.part, self._options = part, options
        self._estimate = self.costs = DraftCosts(share, share / self.together)
        """Costs by which it drafts: the latest that a plan told, so that all ranks draft alike."""
        self._making, self._depth, self._reading, self._read = 0.0, 0, 0.0, 0
        """Seconds of drafts, their depth, seconds of reading and tokens read since `account`."""

    def bind(self, rows: Rows, kv_dtype: str, groups: tuple[GroupShape, ...]) -> None:
        """Make the empty KV of a pool's slot groups, for the sequences in these tables."""
        graph, count = self.part.model.graph, groups[0].blocks
        assert groups == slot_groups(graph, kv_dtype, count, groups[0].span), "of another part"
        context = self._context = min(groups[0].span, self._options.max_context)
        width, own = -(-context // BLOCK), max(1, count)
        pool = PoolShape(BLOCK, graph_groups(graph, kv_dtype, 1 + count * width))
        assert own * self.together <= READ, f"a step has no room for {count} slots"
        limits = StepLimits(READ, own, context)
        self.part.allocate(pool, limits)
        self._rows, self._own = rows, Rows(own, context, "cpu")
        tables = BlockTables(own, context, pool, "cpu")
        for slot in range(count):
            blocks = list(range(1 + slot * width, 1 + (slot + 1) * width))
            tables.write([BlockWrite(slot, at, 0, blocks) for at in range(len(groups))])
        host = self.part.program.host
        self._batches = HostBatches(self._own, tables, pool, limits, tensors=not host)
        self._slots = [self._slot(number) for number in range(count)]
        self._held: dict[int, T] = {}
        """Slots by row."""
        # Warm up: the first step's time must not count.
        for some in (1, min(self.together, context)):
            self._run(StepPlan(0, [0], [0], [some], [True]))

    def account(self, entries: list[int]) -> Drafting:
        """Return the time spent since the last call. `entries`: those of the next plan that it
        could draft for."""
        spent = self._making + self._reading
        told = Drafting(entries, self._estimate, spent, self._making, self._depth, self._read)
        self.clear()
        return told

    def clear(self) -> None:
        """Forget what was counted and noted for a step, which may have been interrupted."""
        self._making, self._depth, self._reading, self._read = 0.0, 0, 0.0, 0

    def take(self, write: SlotWrite) -> None:
        """Give a slot to a row, until it is released or another row takes the slot."""
        slot = self._slots[write.slot]
        self._held = {row: held for row, held in self._held.items() if held is not slot}
        self._held[write.row] = slot
        self._begin(slot, write.tokens)
        self._own.columns[slot.number] = self._rows.columns[write.row]
        self._own.columns["adapter"][slot.number] = -1
        self._own.version += 1

    def release(self, known: Mapping[int, int]) -> None:
        """Leave the slots of rows, of which `known` tokens were known.

        All are left even if a model step of one raises; nothing in them is used again then.
        """
        left = [(self._held.pop(row), row) for row in known if row in self._held]
        try:
            for slot, row in left:
                self._end(slot, row, known[row])
        except BaseException:
            for slot, _ in left:
                slot.computed = 0
            raise

    @abstractmethod
    def room(self, known: int) -> int:
        """Return the number of drafts possible after `known` tokens."""

    @abstractmethod
    def settle(self, row: int, known: int) -> None:
        """Forget what was computed for refused drafts of a row with `known` tokens."""

    @abstractmethod
    def ready(self, row: int, known: int, saves: float) -> bool:
        """Tell whether it could draft at once for a settled row with `known` tokens. `saves`: steps
        that its drafts save."""

    @abstractmethod
    def draft(self, wishes: Mapping[int, tuple[int, int]]) -> dict[int, list[int]]:
        """Draft for rows that are ready: row → (tokens known, drafts wanted) → its drafts."""

    @abstractmethod
    def read(self) -> None:
        """Compute a part of the texts that were not ready."""

    @abstractmethod
    def _slot(self, number: int) -> T: ...

    @abstractmethod
    def _begin(self, slot: T, tokens: int) -> None:
        """Keep what a slot's last row and its next one, which share `tokens`, have in common."""

    @abstractmethod
    def _end(self, slot: T, row: int, known: int) -> None:
        """Prepare a slot for whatever begins like its row."""

    def _run(self, plan: StepPlan) -> tuple[Outputs, StepBatch]:
        """Run a step of slots, whose entries all sample or none."""
        with self.part.inference():
            batch = self._batches.make(plan)
            if self._types is not None:
                batch.types = self._types[: len(batch.tokens)]
            asked = want() if not plan.samples[0] else BEST if batch.rules is None else self.drawn
            return self.part.program.step(batch, asked), batch

    def _copy(self, slot: T, row: int, first: int, count: int, *, shift: int = 0) -> None:
        """Copy `count` tokens of a row from index `first` on; index i has the place i + `shift`."""
        places = slice(first + shift, first + shift + count)
        tokens = self._rows.host_tokens[row, places]
        self._own.host_tokens[slot.number, first : first + count] = tokens


def enter(plan: StepPlan, row: int, start: int, count: int, *, samples: bool) -> None:
    """Add an entry to a plan in the making."""
    plan.rows.append(row)
    plan.starts.append(start)
    plan.counts.append(count)
    plan.samples.append(samples)

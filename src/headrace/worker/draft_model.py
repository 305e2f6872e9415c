"""A smaller model of the same vocabulary that drafts, with its own cache in a few slots.

It draws with the target's own random numbers of (seed, choice, position) after the same filters
(Daliri, Musco and Suresh 2024, arXiv 2408.07978). So where the two models agree about a position
they choose the same token, sampled or not. Its tokens never change the answer, so its cache may be
lost at any time. A row without a slot is not drafted for, and a row that comes back is read again.

A slot has room for a whole sequence. It keeps the text of its last row, and goes to the row whose
text shares the longest prefix with it: the next turn of a conversation is not read twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..base.groups import graph_groups
from ..base.modelfiles import ModelFiles
from ..base.step import BlockWrite, PoolShape, StepPlan
from ..kernels.arrays import host
from ..kernels.cpu.library import LAYOUT
from ..kernels.model import Model
from ..kernels.operators import StepLimits
from ..kernels.program import BEST, RULES, CallByCall, Program, Provider, choose, want
from ..loader.panels import PanelShelf
from ..loader.prepare import prepare
from ..loader.weight_source import WeightSource
from ..loader.weights import load_weights
from ..models.registry import describe
from .draft_costs import DraftCosts, enter
from .host_batch import HostBatches
from .kv_tensors import allocate_kv, clear_null_blocks, leave_biases_out
from .loading import choose_operators, inference_of
from .options import Resolved, WorkerOptions
from .rows import BlockTables, Rows

READ = 256
"""Largest number of unread tokens in one step; all others wait meanwhile."""
NEAR = 16
"""Largest number of tokens read together with the first draft: those that a step or two added."""
BLOCK = 16
"""Tokens of a block of the drafter's cache."""


@dataclass(slots=True)
class _Slot:
    number: int
    computed: int = 0
    """Number of tokens of its row, or of `text`, whose keys and values are in the slot."""
    text: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Tokens that were computed when its last row left."""


class DraftModel(DraftCosts):
    """A drafter that is a model of its own.

    Load (the constructor), `bind` to the tables of an allocated worker, then ask of each row
    whether it is `ready`, and `draft`. Calls come from the worker's thread.
    """

    def __init__(
        self,
        files: ModelFiles,
        options: WorkerOptions,
        resolved: Resolved,
        beside: Provider,
        target: Model,
    ) -> None:
        """Load the model. `options`: the worker's own, for kernels and types too; `beside`: the
        operators of `target`, whose threads it uses."""
        self._options, self._kv_dtype = options, resolved.kv_dtype
        source = WeightSource(load_weights(files))
        shelf = _shelf_of(files, options)
        graph = describe(files.arch)
        self._operators, _ = choose_operators(graph, options, resolved, source, shelf, beside)
        self._inference = inference_of(self._operators)
        with self._inference():
            self._model = prepare(
                graph,
                source,
                self._operators,
                device=resolved.device,
                dtype=resolved.dtype,
                max_context=options.draft_context,
            )
        if shelf is not None:
            shelf.finish()
        self._arch = files.arch
        self._vocabulary = target.graph.outputs["logits"].width
        self.nbytes = self._model.weights.nbytes
        super().__init__(self.nbytes / max(1, target.weights.nbytes), NEAR)

    def bind(self, rows: Rows) -> None:
        """Make an empty cache for the sequences in these tables."""
        slots, context = self._options.draft_slots, self._options.draft_context
        self._width = -(-context // BLOCK)
        groups = graph_groups(self._model.graph, self._kv_dtype, 1 + slots * self._width)
        pool = PoolShape(BLOCK, groups)
        limits = StepLimits(max(READ, slots * NEAR), slots, context)
        with self._inference():
            cache = allocate_kv(pool, "cpu", host=self._operators.host)
            leave_biases_out(self._model, self._operators.name, cache)
            plain = CallByCall(self._model, self._operators, cache, self._operators.drawing)
            self._program: Program = self._operators.compile(plain, limits) or plain
        self._rows = rows
        self._tables = BlockTables(self._options.rows, context, pool, "cpu")
        self._batches = HostBatches(
            rows, self._tables, pool, limits, tensors=not self._program.host
        )
        self._free = [_Slot(number) for number in range(slots)]
        """Slots without a row, the longest unused first."""
        self._held: dict[int, _Slot] = {}
        """Slots by row."""
        self._behind: list[tuple[_Slot, int, int]] = []
        """Slot, row and known tokens of the rows that were asked for and not ready."""
        with self._kept([0]):
            for count in (1, NEAR):  # Warm up: the first step's time must not count.
                self._draw(StepPlan(0, [0], [0], [count], [True]))
            clear_null_blocks(cache)

    def room(self, known: int) -> int:
        """Return the number of drafts possible after `known` tokens."""
        return max(0, self._options.draft_context - known)

    def ready(self, row: int, known: int, saves: float) -> bool:
        """Tell whether it could draft at once for this row with `known` tokens.

        If only unread tokens prevent it, `read` reads some of them, unless reading is expected to
        take more of the steps' time than the drafts save.
        """
        slot = self._held.get(row) or self._take(row, known)
        if slot is None:
            return False
        # Positions computed for refused drafts are overwritten.
        slot.computed = min(slot.computed, known - 1)
        fresh = self._rows.host_tokens[row, slot.computed : known]
        if int(fresh.max()) >= self._arch.vocab_size:
            return False  # The target's vocabulary has rows without a token.
        if len(fresh) > NEAR:
            if len(fresh) * self._reading < saves:
                self._behind.append((slot, row, known))
            return False
        return True

    def release(self, row: int, known: int) -> None:
        """Free the row's slot; `known` of its tokens were known."""
        slot = self._held.pop(row, None)
        if slot is not None:
            slot.computed = min(slot.computed, known - 1)
            slot.text = self._rows.host_tokens[row, : slot.computed].copy()
            self._free.append(slot)

    def read(self) -> None:
        """Compute a part of the texts that were not ready, at most `READ` tokens in all."""
        behind, self._behind = self._behind, []
        plan, left = StepPlan(0, [], [], [], []), READ
        for slot, row, known in behind:
            # The last token is read with the first draft.
            count = min(left, known - 1 - slot.computed)
            if count > 0:
                left -= count
                enter(plan, row, slot.computed, count, samples=False)
                slot.computed += count
        if plan.rows:
            begin = time.perf_counter()
            with self._kept(plan.rows):
                batch = self._batches.make(plan)
                batch.adapters = None
                self._program.step(batch, want())
            self._seconds += time.perf_counter() - begin
            self._read += plan.tokens

    def draft(self, wishes: Mapping[int, tuple[int, int]]) -> dict[int, list[int]]:
        """Draft for rows that are ready: row → (tokens known, drafts wanted) → the drafts of each.

        The drafts are also written after the known tokens in the table of tokens.
        """
        begin = time.perf_counter()
        drafts: dict[int, list[int]] = {row: [] for row in wishes}
        most = max(count for _, count in wishes.values())
        with self._kept(list(wishes)):
            for depth in range(most):
                plan = StepPlan(0, [], [], [], [])
                for row, (known, count) in wishes.items():
                    if count > depth:
                        slot, end = self._held[row], known + depth
                        enter(plan, row, slot.computed, end - slot.computed, samples=True)
                        slot.computed = end
                for row, token in zip(plan.rows, self._draw(plan), strict=True):
                    drafts[row].append(token)
                    self._rows.host_tokens[row, self._held[row].computed] = token
        passed = time.perf_counter() - begin
        self._seconds += passed
        self._drafted = passed, most
        return {row: _known(said, self._vocabulary) for row, said in drafts.items()}

    def _draw(self, plan: StepPlan) -> list[int]:
        """Return the token that the model predicts after each entry, by the rules of its row."""
        batch = self._batches.make(plan)
        batch.adapters = None
        outputs = self._program.step(batch, BEST if batch.rules is None else RULES)
        tokens = host(outputs.tokens)
        if batch.rules is not None and (tokens < 0).any():
            tokens = host(choose(self._operators.drawing, outputs.logits, batch))
        drawn: list[int] = tokens.tolist()
        return drawn

    def _take(self, row: int, known: int) -> _Slot | None:
        """Take the free slot whose text shares the longest prefix with the row's; None if all are
        taken."""
        if not self._free:
            return None
        text = self._rows.host_tokens[row, :known]
        alike = [_common(slot.text, text) for slot in self._free]
        place = int(np.argmax(alike))
        slot = self._held[row] = self._free.pop(place)
        slot.computed = alike[place]
        first = 1 + slot.number * self._width
        blocks = list(range(first, first + self._width))
        groups = range(len(self._tables.tables))
        self._tables.write([BlockWrite(row, group, 0, blocks) for group in groups])
        return slot

    @contextmanager
    def _kept(self, rows: list[int]) -> Iterator[None]:
        """Compute for these rows, then restore the tables' record of what the target computed."""
        computed = self._rows.computed[rows]
        with self._inference():
            yield
        self._rows.computed[rows] = computed


def _known(drafts: list[int], vocabulary: int) -> list[int]:
    """Return the drafts up to the first that the target's vocabulary lacks."""
    return list(takewhile(lambda token: token < vocabulary, drafts))


def _common(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Count the tokens that both have in common at the beginning."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


def _shelf_of(files: ModelFiles, options: WorkerOptions) -> PanelShelf | None:
    if options.panels is None or options.kernels not in ("auto", "cpu"):
        return None
    return PanelShelf(files, Path(options.panels), LAYOUT)

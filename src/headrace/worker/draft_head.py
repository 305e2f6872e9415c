"""A head that drafts from the target's hidden states, with its own cache in a few slots.

Index i of a slot holds the state of place `first` + i and the token of the following place; from
these the head predicts the token after that one. States come with the steps that compute them and
are gone with the next step: a few are kept, a larger number is read at once. The target did not
compute tokens found in its cache. So for the head a text begins where its states begin; of rotated
positions only distances matter.

Drafts after the first go on from the head's own state. The head draws with the target's own random
numbers of (seed, choice, position), as `draft_model` does.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from ..base.groups import graph_groups
from ..base.step import BlockWrite, PoolShape, StepPlan
from ..kernels.arrays import Array, floats, host, tensor
from ..kernels.draws import by_rules
from ..kernels.model import Model
from ..kernels.operators import StepLimits
from ..kernels.program import BEST, LOGITS, CallByCall, Outputs, Program, Provider, want
from ..kernels.weights import DenseWeight
from ..loader.heads import HeadFiles, head_weights, said_ids
from ..loader.prepare import prepare
from ..loader.weight_source import WeightSource
from ..models.heads import STATES, describe_head
from .draft_costs import DraftCosts, enter
from .host_batch import HostBatches
from .kv_tensors import allocate_kv, clear_null_blocks
from .loading import choose_operators, inference_of
from .options import Resolved, WorkerOptions
from .rows import BlockTables, Rows

READ = 256
"""Largest number of states read in one step."""
KEPT = 16
"""States of a row that wait until it drafts, to be read with its first draft."""
AHEAD = 16
"""Indices that a slot leaves free for drafts."""
BLOCK = 16
"""Tokens of a block of the head's cache."""


@dataclass(slots=True)
class _HeadSlot:
    number: int
    states: npt.NDArray[np.float32]
    """Unread states [KEPT, D]."""
    first: int = 0
    """Place of index 0."""
    computed: int = 0
    """Number of indices whose keys and values lie in the cache, computed from states of the
    target."""
    waiting: int = 0
    """Number of states that wait in `states`."""
    text: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Tokens from `first` on that were known when its last row left."""

    @property
    def end(self) -> int:
        """Place whose state comes next."""
        return self.first + self.computed + self.waiting


class DraftHead(DraftCosts):
    """A drafter that reads the target's hidden states.

    Load (the constructor) and `bind` to the tables of an allocated worker. `note` what each step
    computed, ask of each row whether it is `ready`, and `draft`. Calls come from the worker's
    thread.
    """

    def __init__(
        self,
        files: HeadFiles,
        options: WorkerOptions,
        resolved: Resolved,
        beside: Provider,
        target: Model,
    ) -> None:
        """Load the head. `options`: the worker's own, for kernels and types too.

        `beside`: operators of `target`, whose threads the head uses. It also shares the target's
        embedding and output head if it has none.
        """
        self._options, self._kv_dtype = options, resolved.kv_dtype
        self._arch, self._ids = files.arch.arch, said_ids(files)
        self._limits = StepLimits(
            max(READ, options.draft_slots * KEPT), options.draft_slots, options.draft_context
        )
        states = np.zeros((self._limits.tokens, self._arch.hidden), np.float32)
        source = WeightSource([*head_weights(files), (f"{STATES}.weight", states)])
        graph = describe_head(files.arch, len(states))
        self._operators, _ = choose_operators(graph, options, resolved, source, None, beside)
        self._inference = inference_of(self._operators)
        with self._inference():
            self._model = prepare(
                graph,
                source,
                self._operators,
                device=resolved.device,
                dtype=resolved.dtype,
                max_context=options.draft_context,
                shared=target.weights,
            )
        table = next(ref for ref in graph.weights() if ref.names == (f"{STATES}.weight",))
        given = cast(DenseWeight, self._model.weights.weight(table)).data
        self._states: npt.NDArray[np.float32] = host(given)
        """States [tokens of a step, D]: the table that the graph reads."""
        self.nbytes = self._model.weights.nbytes
        head = next(ref for ref in graph.weights() if ref.role == "logits")
        ends = 0 if files.arch.own_head else 4 * head.numbers
        super().__init__((self.nbytes + ends) / max(1, target.weights.nbytes), KEPT)

    def bind(self, rows: Rows) -> None:
        """Make an empty cache for the sequences in these tables."""
        slots, context = self._options.draft_slots, self._options.draft_context
        width = -(-context // BLOCK)
        pool = PoolShape(BLOCK, graph_groups(self._model.graph, self._kv_dtype, 1 + slots * width))
        with self._inference():
            cache = allocate_kv(pool, "cpu", host=self._operators.host)
            plain = CallByCall(self._model, self._operators, cache, self._operators.drawing)
            self._program: Program = self._operators.compile(plain, self._limits) or plain
        self._rows, self._own = rows, Rows(slots, context, "cpu")
        """Tables of the target, and of the slots: index i has the token of place first + i + 1."""
        tables = BlockTables(slots, context, pool, "cpu")
        blocks = [list(range(1 + slot * width, 1 + (slot + 1) * width)) for slot in range(slots)]
        for group in range(len(pool.groups)):
            tables.write([BlockWrite(slot, group, 0, blocks[slot]) for slot in range(slots)])
        self._batches = HostBatches(
            self._own, tables, pool, self._limits, tensors=not self._program.host
        )
        numbers = np.arange(self._limits.tokens)
        self._numbers = numbers if self._program.host else tensor(numbers)
        """Rows of `_states` that a step's tokens read."""
        room = KEPT, self._arch.hidden
        self._free = [_HeadSlot(slot, np.zeros(room, np.float32)) for slot in range(slots)]
        """Slots without a row, the longest unused first."""
        self._held: dict[int, _HeadSlot] = {}
        """Slots by row."""
        for count in (1, KEPT):  # Warm up: the first step's time must not count.
            self._run(StepPlan(0, [0], [0], [count], [True]))
        clear_null_blocks(cache)

    def room(self, known: int) -> int:
        """Return the number of drafts possible after `known` tokens."""
        return min(AHEAD, max(0, self._options.max_context - known))

    def ready(self, row: int, known: int, saves: float) -> bool:
        """Tell whether it could draft at once for this row with `known` tokens."""
        slot = self._held.get(row)
        return slot is not None and slot.waiting > 0 and slot.end == known - 1

    def release(self, row: int, known: int) -> None:
        """Free the row's slot; `known` of its tokens were known."""
        slot = self._held.pop(row, None)
        if slot is not None:
            # The next turn goes on after all of it.
            left = min(slot.waiting, known - 1 - slot.first - slot.computed)
            self._read_all(row, slot, slot.states[: max(0, left)])
            last = slot.first + slot.computed + 1
            slot.text = self._rows.host_tokens[row, slot.first : last].copy()
            slot.waiting = 0
            self._free.append(slot)

    def read(self) -> None:
        """Do nothing: states beyond `KEPT` are read when they come."""

    def note(self, plan: StepPlan, rows: Collection[int], states: Array) -> None:
        """Take the hidden states [N, D] of a step's tokens, those of `rows` that were accepted:
        states after the first refused draft are invalid."""
        given, at = floats(states), 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            true = int(self._rows.computed[row]) - start
            if row in rows and true > 0:
                self._keep(row, start, given[at : at + true])
            at += count

    def _keep(self, row: int, start: int, states: npt.NDArray[np.float32]) -> None:
        slot = self._held.get(row) or self._take(row, start)
        if slot is None:
            return
        room = self._options.draft_context - AHEAD
        if slot.end != start or start + len(states) - slot.first > room:
            # The text went on without the head, or is longer than a slot: begin again.
            left = room // 2 if len(states) > room else len(states)
            slot.first, slot.computed, slot.waiting = start + len(states) - left, 0, 0
            states = states[len(states) - left :]
        if slot.waiting + len(states) > KEPT:
            begin = time.perf_counter()
            states = np.concatenate([slot.states[: slot.waiting], states])
            # The last state is read with the first draft.
            self._read_all(row, slot, states[:-1])
            slot.states[0], slot.waiting = states[-1], 1
            self._seconds += time.perf_counter() - begin
        else:
            slot.states[slot.waiting : slot.waiting + len(states)] = states
            slot.waiting += len(states)

    def _read_all(self, row: int, slot: _HeadSlot, states: npt.NDArray[np.float32]) -> None:
        for first in range(0, len(states), READ):
            some = states[first : first + READ]
            self._states[: len(some)] = some
            self._tell(row, slot, len(some))
            self._run(StepPlan(0, [slot.number], [slot.computed], [len(some)], [False]))
            slot.computed += len(some)
            self._read += len(some)

    def draft(self, wishes: Mapping[int, tuple[int, int]]) -> dict[int, list[int]]:
        """Draft for rows that are ready: row → (tokens known, drafts wanted) → its drafts."""
        begin = time.perf_counter()
        drafts: dict[int, list[int]] = {row: [] for row in wishes}
        most = max(count for _, count in wishes.values())
        last: dict[int, npt.NDArray[np.float32]] = {}
        """Head's own state at its last draft, by row."""
        for depth in range(most):
            plan, asked, at = StepPlan(0, [], [], [], []), list[int](), 0
            for row, (_, count) in wishes.items():
                if count <= depth:
                    continue
                slot = self._held[row]
                asked.append(row)
                some = slot.states[: slot.waiting] if depth == 0 else last[row][None]
                if depth == 0:
                    self._tell(row, slot, len(some))
                start = slot.computed + max(0, depth - 1)
                enter(plan, slot.number, start, len(some), samples=True)
                self._states[at : at + len(some)] = some
                at += len(some)
                if depth == 0:
                    slot.computed, slot.waiting = slot.computed + slot.waiting, 0
            said, hidden = self._draw(plan, [self._held[row].first for row in asked])
            for row, token, state in zip(asked, said, hidden, strict=True):
                slot, last[row] = self._held[row], state
                drafts[row].append(token)
                self._own.host_tokens[slot.number, slot.computed + depth] = token
        passed = time.perf_counter() - begin
        self._seconds += passed
        self._drafted = passed, most
        return drafts

    def _draw(self, plan: StepPlan, firsts: list[int]) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Return the token that the head predicts after each entry, by the rules of its row, and
        its own state [R, D] there. `firsts`: the place of index 0 of each."""
        outputs, rules = self._run(plan)
        if rules is None:
            tokens = host(outputs.tokens)
        else:
            places = np.array(plan.starts) + plan.counts + np.array(firsts) + 1
            with self._inference():
                tokens = host(by_rules(self._operators.drawing, outputs.logits, rules, places))
        if self._ids is not None:
            tokens = self._ids[tokens]
        said: list[int] = tokens.tolist()
        return said, floats(outputs.hidden).copy()

    def _run(self, plan: StepPlan) -> tuple[Outputs, npt.NDArray[np.void] | None]:
        """Run a step; return its outputs, and the rules of its rows if some are not greedy."""
        with self._inference():
            batch = self._batches.make(plan)
            batch.adapters = None
            batch.types = self._numbers[: len(batch.tokens)]
            asked = want() if not plan.samples[0] else BEST if batch.rules is None else LOGITS
            return self._program.step(batch, asked), batch.rules

    def _tell(self, row: int, slot: _HeadSlot, count: int) -> None:
        """Copy the tokens that belong to the next `count` states, which are all known."""
        first, at = slot.first + slot.computed + 1, slot.computed
        known = self._rows.host_tokens[row, first : first + count]
        self._own.host_tokens[slot.number, at : at + count] = known

    def _take(self, row: int, start: int) -> _HeadSlot | None:
        """Take a slot for a row whose states begin at `start`: one whose text agrees with the row's
        up to there, else the longest unused; None if all are taken."""
        if not self._free:
            return None
        text = self._rows.host_tokens[row]
        place = 0
        for index, slot in enumerate(self._free):
            known = start + 1 - slot.first
            if 0 < known <= len(slot.text) and np.array_equal(
                slot.text[:known], text[slot.first : start + 1]
            ):
                place, slot.computed = index, known - 1
                break
        slot = self._held[row] = self._free.pop(place)
        slot.waiting = 0
        self._own.columns[slot.number] = self._rows.columns[row]
        self._own.columns["adapter"][slot.number] = -1
        self._own.version += 1
        return slot

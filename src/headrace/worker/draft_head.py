"""A head that drafts from the target's hidden states.

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

from ..base.step import StepPlan
from ..kernels.arrays import Array, floats, host, tensor
from ..kernels.draws import by_rules
from ..kernels.model import Model
from ..kernels.program import LOGITS
from ..kernels.weights import DenseWeight
from ..loader.heads import HeadFiles, said_ids
from ..models.heads import STATES
from .draft_slots import DraftPart, Slot, enter
from .loading import READ
from .options import WorkerOptions
from .part import Part

KEPT = 16
"""States of a row that wait until it drafts, to be read with its first draft."""
AHEAD = 16
"""Indices that a slot leaves free for drafts."""


@dataclass(slots=True)
class _HeadSlot(Slot):
    states: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """Unread states [KEPT, D]."""
    first: int = 0
    """Place of index 0."""
    waiting: int = 0
    """Number of states that wait in `states`; `computed` counts those that were read."""

    @property
    def end(self) -> int:
        """Place whose state comes next."""
        return self.first + self.computed + self.waiting


class DraftHead(DraftPart[_HeadSlot]):
    """A drafter that reads the target's hidden states: `note` what each step computed."""

    together, drawn = KEPT, LOGITS

    def __init__(self, part: Part, files: HeadFiles, options: WorkerOptions, target: Model) -> None:
        """`part`: the loaded head of `files`, which drafts for `target`."""
        graph, weights = part.model.graph, part.model.weights
        head = next(ref for ref in graph.weights() if ref.role == "logits")
        ends = 0 if files.arch.own_head else 4 * head.numbers
        share = (weights.nbytes + ends) / max(1, target.weights.nbytes)
        super().__init__(part, options, share)
        self._arch, self._ids = files.arch.arch, said_ids(files)
        table = next(ref for ref in graph.weights() if ref.names == (f"{STATES}.weight",))
        self._states: npt.NDArray[np.float32] = host(cast(DenseWeight, weights.weight(table)).data)
        """States [tokens of a step, D]: the table that the graph reads."""
        numbers = np.arange(READ)
        # A step's tokens read the rows of `_states` in their order.
        self._types = numbers if part.operators.host else tensor(numbers)

    def room(self, known: int) -> int:
        return min(AHEAD, max(0, self._options.max_context - known))

    def settle(self, row: int, known: int) -> None:
        """Do nothing: `note` takes no states of refused drafts."""

    def ready(self, row: int, known: int, saves: float) -> bool:
        slot = self._held.get(row)
        return slot is not None and slot.waiting > 0 and slot.end == known - 1

    def read(self) -> None:
        """Do nothing: states beyond `KEPT` are read when they come."""

    def note(self, plan: StepPlan, rows: Collection[int], states: Array) -> None:
        """Take the hidden states [N, D] of a step's tokens, those of `rows` that were accepted:
        states after the first refused draft are invalid."""
        given, at = floats(states), 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            true = int(self._rows.computed[row]) - start
            if row in rows and row in self._held and true > 0:
                self._keep(self._held[row], row, start, given[at : at + true])
            at += count

    def _keep(self, slot: _HeadSlot, row: int, start: int, states: npt.NDArray[np.float32]) -> None:
        room = self._context - AHEAD
        if slot.first <= start < slot.first + slot.computed:
            # The slot's last text shares more with this one than the target found in its cache.
            slot.computed, slot.waiting = start - slot.first, 0
        if slot.end != start or start + len(states) - slot.first > room:
            # The text went on without the head, or is longer than a slot: begin again.
            left = room // 2 if len(states) > room else len(states)
            slot.first, slot.computed, slot.waiting = start + len(states) - left, 0, 0
            states = states[len(states) - left :]
        if slot.waiting + len(states) > KEPT:
            states = np.concatenate([slot.states[: slot.waiting], states])
            # The last state is read with the first draft.
            self._read_all(row, slot, states[:-1])
            slot.states[0], slot.waiting = states[-1], 1
        else:
            slot.states[slot.waiting : slot.waiting + len(states)] = states
            slot.waiting += len(states)

    def _read_all(self, row: int, slot: _HeadSlot, states: npt.NDArray[np.float32]) -> None:
        begin = time.perf_counter()
        for first in range(0, len(states), READ):
            some = states[first : first + READ]
            self._states[: len(some)] = some
            self._tell(row, slot, len(some))
            self._run(StepPlan(0, [slot.number], [slot.computed], [len(some)], [False]))
            slot.computed += len(some)
            self._read += len(some)
        self._reading += time.perf_counter() - begin

    def draft(self, wishes: Mapping[int, tuple[int, int]]) -> dict[int, list[int]]:
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
        self._making, self._depth = time.perf_counter() - begin, most
        return drafts

    def _draw(self, plan: StepPlan, firsts: list[int]) -> tuple[list[int], npt.NDArray[np.float32]]:
        """Return the token that the head predicts after each entry, by the rules of its row, and
        its own state [R, D] there. `firsts`: the place of index 0 of each."""
        outputs, batch = self._run(plan)
        if batch.rules is None:
            tokens = host(outputs.tokens)
        else:
            places = np.array(plan.starts) + plan.counts + np.array(firsts) + 1
            with self.part.inference():
                drawing = self.part.operators.drawing
                tokens = host(by_rules(drawing, outputs.logits, batch.rules, places))
        if self._ids is not None:
            tokens = self._ids[tokens]
        said: list[int] = tokens.tolist()
        return said, floats(outputs.hidden).copy()

    def _tell(self, row: int, slot: _HeadSlot, count: int) -> None:
        """Copy the tokens that belong to the next `count` states, which are all known."""
        self._copy(slot, row, slot.computed, count, shift=slot.first + 1)

    def _slot(self, number: int) -> _HeadSlot:
        return _HeadSlot(number, states=np.zeros((KEPT, self._arch.hidden), np.float32))

    def _begin(self, slot: _HeadSlot, tokens: int) -> None:
        # An index also follows from the token after its place.
        slot.computed = max(0, min(slot.computed, tokens - 1 - slot.first))
        slot.waiting = 0

    def _end(self, slot: _HeadSlot, row: int, known: int) -> None:
        # The next turn goes on after all of it.
        left = min(slot.waiting, known - 1 - slot.first - slot.computed)
        self._read_all(row, slot, slot.states[: max(0, left)])
        slot.waiting = 0

"""A smaller model of the same vocabulary that drafts.

It draws with the target's own random numbers of (seed, choice, position) after the same filters
(Daliri, Musco and Suresh 2024, arXiv 2408.07978). So where the two models agree about a position
they choose the same token, sampled or not. Its tokens never change the answer, so its KV may be
lost at any time: a row that comes back is read again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import takewhile

from ..base.arch import ModelArch
from ..base.step import StepPlan
from ..kernels.arrays import host
from ..kernels.model import Model
from ..kernels.program import RULES, choose
from .draft_slots import DraftPart, Slot, enter
from .loading import READ
from .options import WorkerOptions
from .part import Part

NEAR = 16
"""Largest number of tokens read together with the first draft: those that a step or two added."""


class DraftModel(DraftPart[Slot]):
    """A drafter that is a model of its own; index i of a slot is place i of its row."""

    together, drawn = NEAR, RULES

    def __init__(self, part: Part, arch: ModelArch, options: WorkerOptions, target: Model) -> None:
        """`part`: the loaded model of `arch`, which drafts for `target`."""
        weights = part.model.weights.nbytes / max(1, target.weights.nbytes)
        super().__init__(part, options, weights)
        self._arch, self._vocabulary = arch, target.graph.outputs["logits"].width
        self._behind: list[tuple[Slot, int, int]] = []
        """Slot, row and known tokens of the rows that were asked for and not ready."""

    def room(self, known: int) -> int:
        return max(0, self._context - known)

    def clear(self) -> None:
        super().clear()
        self._behind = []

    def settle(self, row: int, known: int) -> None:
        slot = self._held.get(row)
        if slot is not None:
            # Positions computed for refused drafts are overwritten.
            slot.computed = min(slot.computed, known - 1)

    def ready(self, row: int, known: int, saves: float) -> bool:
        """Tell whether it could draft at once for a settled row with `known` tokens.

        If only unread tokens prevent it, `read` reads some of them, unless reading is expected to
        take more of the steps' time than the drafts save.
        """
        slot = self._held.get(row)
        if slot is None:
            return False
        fresh = self._rows.host_tokens[row, slot.computed : known]
        if int(fresh.max()) >= self._arch.vocab_size:
            return False  # The target's vocabulary has rows without a token.
        if len(fresh) > NEAR:
            if len(fresh) * self.costs.read < saves:
                self._behind.append((slot, row, known))
            return False
        return True

    def read(self) -> None:
        """Compute a part of the texts that were not ready, at most `READ` tokens in all."""
        behind, self._behind = self._behind, []
        plan, left = StepPlan(0, [], [], [], []), READ
        for slot, row, known in behind:
            # The last token is read with the first draft.
            count = min(left, known - 1 - slot.computed)
            if count > 0:
                left -= count
                self._copy(slot, row, slot.computed, count)
                enter(plan, slot.number, slot.computed, count, samples=False)
                slot.computed += count
        if plan.rows:
            begin = time.perf_counter()
            self._run(plan)
            self._reading += time.perf_counter() - begin
            self._read += plan.tokens

    def draft(self, wishes: Mapping[int, tuple[int, int]]) -> dict[int, list[int]]:
        begin = time.perf_counter()
        drafts: dict[int, list[int]] = {row: [] for row in wishes}
        most = max(count for _, count in wishes.values())
        for row, (known, _) in wishes.items():
            slot = self._held[row]
            self._copy(slot, row, slot.computed, known - slot.computed)
        for depth in range(most):
            plan, asked = StepPlan(0, [], [], [], []), list[int]()
            for row, (known, count) in wishes.items():
                if count > depth:
                    slot, end = self._held[row], known + depth
                    asked.append(row)
                    enter(plan, slot.number, slot.computed, end - slot.computed, samples=True)
                    slot.computed = end
            for row, token in zip(asked, self._draw(plan), strict=True):
                slot = self._held[row]
                drafts[row].append(token)
                self._own.host_tokens[slot.number, slot.computed] = token
        self._making, self._depth = time.perf_counter() - begin, most
        return {row: _known(said, self._vocabulary) for row, said in drafts.items()}

    def _draw(self, plan: StepPlan) -> list[int]:
        """Return the token that the model predicts after each entry, by the rules of its row."""
        outputs, batch = self._run(plan)
        tokens = host(outputs.tokens)
        if batch.rules is not None and (tokens < 0).any():
            with self.part.inference():
                drawing = self.part.operators.drawing
                tokens = host(choose(drawing, outputs.logits, batch))
        drawn: list[int] = tokens.tolist()
        return drawn

    def _slot(self, number: int) -> Slot:
        return Slot(number)

    def _begin(self, slot: Slot, tokens: int) -> None:
        slot.computed = min(slot.computed, tokens)

    def _end(self, slot: Slot, row: int, known: int) -> None:
        slot.computed = min(slot.computed, known - 1)


def _known(drafts: list[int], vocabulary: int) -> list[int]:
    """Return the drafts up to the first that the target's vocabulary lacks."""
    return list(takewhile(lambda token: token < vocabulary, drafts))

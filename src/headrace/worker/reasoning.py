"""Reasoning budgets: a largest number of tokens between the marks, then the closing mark.

A row's reasoning begins with its prompt, if that ends inside it, or with the first opening mark
that it generates. It ends with the closing mark, once and for all. When the budget is spent the
next token is the closing mark: all others are masked, for greedy and sampled rows alike. This mask
comes after a grammar's, which allows the mark wherever no character is half written (see
`text.grammar.after_reasoning`). Log-probabilities are of the raw distribution, so they show the
model's own preference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..base.spec import ReasoningBudget
from ..base.step import Admission, StepPlan
from ..kernels.arrays import Array
from ..kernels.program import LOGITS, Want
from .arrays import like
from .features import NOTHING, Arrived, Indices, RowWish
from .rows import Rows


@dataclass(slots=True)
class _Row:
    rule: ReasoningBudget
    inside: bool
    used: int = 0
    """Tokens of reasoning so far."""

    def take(self, token: int) -> bool:
        """Count a generated token. Returns False when there is nothing more to watch."""
        if not self.inside:
            self.inside = token == self.rule.open
        elif token == self.rule.close:
            return False
        else:
            self.used += 1
        return True

    @property
    def spent(self) -> bool:
        return self.inside and self.used >= self.rule.tokens


class ReasoningBudgets(RowWish[_Row]):
    """Rows with a budget, until their reasoning has ended."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._table = rows

    def wish(self, admission: Admission) -> _Row | None:
        """Return the row's budget; after a preemption earlier tokens count too."""
        rule = admission.spec.reasoning
        if rule is None:
            return None
        row = _Row(rule, rule.inside)
        watched = all(row.take(token) for token in admission.tokens[admission.prompt_length :])
        return row if watched else None

    def wants(self, plan: StepPlan) -> Want:
        return NOTHING if self._rows.keys().isdisjoint(plan.rows) else LOGITS

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        """Leave only the closing mark, where allowed, to rows whose budget is spent. A drafting row
        appears here once for each position; its drafts count as generated."""
        spent: list[tuple[int, int]] = []
        last, found = -1, None
        for index, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
            if row != last:
                last, found = row, self._rows.get(row)
            elif found is not None:
                found = replace(found)
                if not found.take(int(self._table.host_tokens[row, place - 1])):
                    found = None
            if found is not None and found.spent:
                spent.append((index, found.rule.close))
        if spent:
            only = like(np.array(spent), logits)
            # Amid a character a grammar forbids the mark: it waits for the character's end.
            only = only[logits[only[:, 0], only[:, 1]] > float("-inf")]
            logits[only[:, 0]] = float("-inf")
            logits[only[:, 0], only[:, 1]] = 0.0

    def advance(self, rows: Indices, arrived: Arrived) -> Mapping[int, str]:
        if self._rows:
            for row, token in zip(rows.tolist(), arrived(), strict=True):
                found = self._rows.get(row)
                if found is not None and not found.take(token):
                    del self._rows[row]
        return {}

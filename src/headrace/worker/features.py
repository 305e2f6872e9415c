"""Row features: what a row may ask for beyond a token, one list, all with the same six verbs.

A new wish is a class of its own and a place in the list that `Worker` makes. The list's order
matters: logits go through `mask` in that order. First the raw logits are kept for
log-probabilities. Then come features that forbid (a grammar, a reasoning budget, lists of ids; then
unwanted words and `min_tokens`, which look at the tokens left). After them come features that shift
logits (bias, penalties), then filters. Features that touch no logits come last.

A step pays only for its rows' wishes: a feature is called for steps in which a row asks for it.
Rows that ask for nothing never come here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..base.step import Admission, StepPlan, StepResult
from ..kernels.arrays import Array
from ..kernels.program import Hidden, Outputs, Want, want

Arrived = Callable[[], Sequence[int]]
"""Callable that waits for a step's tokens [R]."""

Indices = npt.NDArray[np.int64]
T = TypeVar("T")
NOTHING = want()


class RowFeature:
    """One thing that rows may ask for. An undefined verb does nothing."""

    want: Want = NOTHING
    """Return value of `wants` if it is the same for every step."""

    def admit(self, admission: Admission) -> bool:
        """Note the wishes of the row that is taken; return whether it asks for this feature.

        Also called after a preemption: then the tokens include those generated before. Raises
        `EngineFault` if the wish cannot be served.
        """
        raise NotImplementedError

    def release(self, rows: Sequence[int]) -> None:
        """Forget these rows; most of them never asked."""
        raise NotImplementedError

    def wants(self, plan: StepPlan) -> Want:
        """Name the outputs that this step needs in addition to tokens: `logits` if `mask` reads or
        changes them."""
        return self.want

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        """Change logits [R, V] fp32 of these rows [R] in place; `places` [R] is the position of
        each new token in its sequence."""

    def advance(self, rows: Indices, arrived: Arrived) -> Mapping[int, str]:
        """Take the tokens that `rows` [R] got. Returns index in `rows` → why that token is void and
        its sequence has to end."""
        return {}

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        """Write into `result` the step's outputs other than tokens; all tokens are chosen, and the
        outputs are complete."""


class RowWish(RowFeature, Generic[T]):
    """A feature that keeps a wish for each row that has one."""

    def __init__(self) -> None:
        self._rows: dict[int, T] = {}

    def wish(self, admission: Admission) -> T | None:
        """Return this row's wish; None if it has none."""
        raise NotImplementedError

    def admit(self, admission: Admission) -> bool:
        wish = self.wish(admission)
        if wish is None:
            return False
        self._rows[admission.row] = wish
        return True

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)


class Asked(NamedTuple):
    """Features that some row of a step asks for, in the order of the list."""

    features: tuple[RowFeature, ...]

    def wants(self, plan: StepPlan) -> tuple[bool, Hidden]:
        """Tell whether logits are wanted, and which hidden states."""
        wants = [feature.wants(plan) for feature in self.features]
        every = any(each.hidden == "every" for each in wants)
        return any(each.logits for each in wants), "every" if every else "none"

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        for feature in self.features:
            feature.mask(logits, rows, places)

    def advance(self, rows: Indices, arrived: Arrived) -> dict[int, str]:
        failures: dict[int, str] = {}
        for feature in self.features:
            failures |= feature.advance(rows, arrived)
        return failures

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        for feature in self.features:
            feature.collect(plan, outputs, result)


class Features:
    """All row features of a worker, and which row asks for which."""

    def __init__(self, listed: Sequence[RowFeature], rows: int) -> None:
        self.listed = tuple(listed)
        self._asked = np.zeros(rows, np.uint32)
        """Wishes by row [rows]: bit i stands for the i-th feature of the list."""
        self.rows: set[int] = set()
        """Held rows that ask for any feature."""

    def admit(self, admission: Admission) -> None:
        bits = 0
        for place, feature in enumerate(self.listed):
            bits |= feature.admit(admission) << place
        if bits:
            self._asked[admission.row] = bits
            self.rows.add(admission.row)

    def release(self, rows: Sequence[int]) -> None:
        self._asked[rows] = 0
        self.rows.difference_update(rows)
        for feature in self.listed:
            feature.release(rows)

    def of(self, rows: list[int]) -> Asked:
        """Return the features that these rows ask for."""
        if self.rows.isdisjoint(rows):
            return Asked(())
        bits = int(np.bitwise_or.reduce(self._asked[rows]))
        return Asked(tuple(each for place, each in enumerate(self.listed) if bits >> place & 1))

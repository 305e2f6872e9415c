"""Owns: work and its states, queues, budgets, the scheduler, preemption.
Takes → gives: requests and step results → step plans and sequence deltas.
Does not know: tensors, text, models by name, clocks other than the one it is given.
Invariant: every request ends exactly once; a plan never exceeds its budget.
Where does my change go: the order and the amount of work.
"""

from __future__ import annotations

from .limits import Limits, StepRoom
from .once import Once
from .price import StepPrices
from .resource import Resource
from .scheduler import Scheduler
from .sequence import Sequence
from .work import ALL, State, Work

__all__ = [
    "ALL", "Limits", "Once", "Resource", "Scheduler", "Sequence", "State", "StepPrices", "StepRoom",
    "Work",
]  # fmt: skip

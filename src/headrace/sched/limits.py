"""The bounds inside which the scheduler works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.base.errors import OptionError

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Made once, at start, from the resolved options and the memory plan."""

    rows: int
    """Rows of the worker's tables: sequences that can run at the same time."""
    step_tokens: int
    """Most units that one step computes: what its buffers hold."""
    max_context: int
    """Most units of one piece of work: of a text, prompt and output together."""
    max_waiting: int
    """Work that may wait beyond that which has a free row, before requests are refused."""
    policy: Policy = "fcfs"
    depth: int = 1
    """Steps in flight: with 2 the next is planned before the result of the last is there."""
    drafts: int = 0
    """Drafts that a decode verifies beside its own token, at most."""
    stages: int = 1
    """Parts of the model that compute steps one behind the other, so many at a time: with more than
    one, a step decodes sequences that no step in flight has, and its share of them."""

    def __post_init__(self) -> None:
        for name, low in (("rows", 1), ("max_context", 2), ("max_waiting", 0), ("drafts", 0)):
            if getattr(self, name) < low:
                raise OptionError(f"{name} must be at least {low}", param=name)
        if self.step_tokens < 1:
            raise OptionError("step_tokens must be at least 1", param="step_tokens")
        if self.policy not in ("fcfs", "priority"):
            raise OptionError(
                f"policy must be one of fcfs, priority, not {self.policy!r}", param="policy"
            )
        if self.depth not in (1, 2) and self.depth != self.stages:
            raise OptionError(f"depth must be 1 or 2, not {self.depth}", param="depth")

    @property
    def running(self) -> int:
        """Most sequences that run: so few that each of them can decode in every step."""
        return min(self.rows, self.step_tokens)

"""The bounds of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.base.denoising import Denoiser
from headrace.base.errors import OptionError
from headrace.base.items import ItemCatalogue

Policy = Literal["fcfs", "priority"]


LEAST_STEP = 256
"""Units to which a step that found no memory may shrink; more, if more sequences may run."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds made once, at start, from the resolved options and the memory plan."""

    rows: int
    """Rows of the worker's tables: sequences that can run at the same time."""
    step_tokens: int
    """Most units that one step computes; its buffers hold this number."""
    max_context: int
    """Most units of one piece of work; for text, prompt and output together."""
    max_waiting: int
    """Most work that waits, in addition to work that has a free row, before requests are refused.
    """
    policy: Policy = "fcfs"
    depth: int = 1
    """Steps in flight: with 2 the next is planned before the result of the last is there."""
    drafts: int = 0
    """Most drafts that a decode verifies in addition to its own token."""
    stages: int = 1
    """Pipeline stages of the model; this number of steps is computed at a time, one after the
    other. With more than one, a step decodes its share of the sequences: some that no step in
    flight has."""
    atom: int = 0
    """Most tokens of a prompt that see each other, so that one step computes them. They fit beside
    a token of each other sequence, however small a step has become."""
    cuts: bool = False
    """Whether units are computed each by itself, so that work which keeps nothing between two steps
    is cut anywhere, too."""
    catalogue: ItemCatalogue | None = None
    """Items that the model retrieves."""
    denoiser: Denoiser | None = None
    """Shape of a model that draws: a step of a picture has as many units as it has tokens."""

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
    def unkept(self) -> int:
        """Most units of work that keeps nothing between two steps: one step computes it, unless it
        is cut anywhere."""
        return self.max_context if self.cuts else self.step_tokens

    @property
    def running(self) -> int:
        """Most sequences that run, few enough that each of them can decode in every step."""
        return min(self.rows, self.step_tokens)


@dataclass(slots=True)
class StepRoom:
    """Most units of a step now: fewer than its limit after a step that found no memory."""

    units: int
    least: int
    shared: int | None = None
    """Most units while other models wait for the device; None: none do."""

    @property
    def now(self) -> int:
        """Most units of the next step."""
        return self.units if self.shared is None else min(self.units, self.shared)

    @classmethod
    def of(cls, limits: Limits, *, keeps: bool) -> StepRoom:
        """`keeps`: work keeps blocks between two steps, so that its units may be cut anywhere."""
        keeps = keeps or limits.cuts
        least = max(LEAST_STEP, limits.running + limits.atom) if keeps else limits.step_tokens
        return cls(limits.step_tokens, least)

    def halve(self) -> bool:
        """Halve the room; return False if it is as small as it gets."""
        if self.units <= self.least:
            return False
        self.units = max(self.least, self.units // 2)
        return True

"""Work of a known number of steps, each of which rests on the one before: a picture."""

from __future__ import annotations

from headrace.base.request import Request, SequenceDelta
from headrace.base.step import StepPlan, StepResult

from .work import Work


class Stepped(Work):
    """A loop whose steps have `atom` units each. The worker keeps its state in the row, so work
    that was preempted begins again."""

    __slots__ = ()

    def __init__(
        self, id: int, request: Request, steps: int, size: int, rank: tuple[float, int]
    ) -> None:
        """`size`: units of a step."""
        super().__init__(id, request, 0, steps * size, rank, keeps=False, atom=size)

    @property
    def known(self) -> int:
        return self.limit

    def chunk(self, start: int, room: int, most: int = 0) -> int:
        """Return the units of one step, if they fit: never those of two."""
        return self.atom if self.atom <= max(room, most) else 0

    def take(
        self, plan: StepPlan, result: StepResult, entry: int, *, grows: bool
    ) -> SequenceDelta | None:
        found = None if result.outputs is None else result.outputs.get(entry)
        if found is None:
            return None
        done = plan.starts[entry] + plan.counts[entry] == self.limit
        delta = self.end("stop") if done else self.news()
        delta.output = found
        return delta

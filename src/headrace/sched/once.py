"""Work that is computed once and ends with its output: a vector, a score."""

from __future__ import annotations

from headrace.base.request import SequenceDelta
from headrace.base.step import StepPlan, StepResult

from .work import Work


class Once(Work):
    """An input that is known completely. Where attention is bidirectional its atom is the whole
    input, and it keeps nothing."""

    __slots__ = ()

    def take(
        self, plan: StepPlan, result: StepResult, entry: int, *, grows: bool
    ) -> SequenceDelta | None:
        assert not grows, "all of it was known"
        outputs = result.outputs
        if outputs is None or entry not in outputs:
            return None
        delta = self.end("stop")
        delta.output = outputs[entry]
        return delta

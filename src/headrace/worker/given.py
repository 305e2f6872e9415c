"""Input embeddings in the prompts of a worker's rows, which are not text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..base.spec import InputSpan
from ..base.step import StepPlan
from ..kernels.given import GivenRows


class PromptRows:
    """By row, the spans of its prompt that came as input embeddings."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, npt.NDArray[np.float32]]]] = {}

    def admit(self, row: int, inputs: Sequence[InputSpan]) -> None:
        """Keep the spans until the row is released."""
        if inputs:
            self._spans[row] = [
                (span.first, np.frombuffer(span.rows, np.float32).reshape(span.length, -1))
                for span in inputs
            ]

    def release(self, rows: Sequence[int]) -> None:
        for row in rows if self._spans else ():
            self._spans.pop(row, None)

    def of(self, plan: StepPlan) -> GivenRows | None:
        """Return the input embeddings of a step, for `StepBatch.given`."""
        if self._spans.keys().isdisjoint(plan.rows):
            return None
        places, found, begin = [], [], 0
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            for first, rows in self._spans.get(row, ()):
                low, high = max(first, start), min(first + len(rows), start + count)
                if low < high:
                    places.append(np.arange(low, high) + (begin - start))
                    found.append(rows[low - first : high - first])
            begin += count
        return GivenRows(np.concatenate(places), np.concatenate(found)) if places else None

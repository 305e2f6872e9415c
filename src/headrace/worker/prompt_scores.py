"""Log-probabilities of prompt tokens, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..base.step import Admission, StepPlan, StepResult, TokenLogprobs
from ..kernels.arrays import Array, tensor
from ..kernels.program import EVERY, Outputs, Want
from .arrays import concatenate, copy, int64
from .features import NOTHING, RowWish
from .logprobs import log_probabilities
from .rows import Rows

Head = Callable[[Array], Array]
LOGIT_ROWS = 64
"""Rows of logits held at once: those of a long chunk and a large vocabulary would be gigabytes."""


class PromptScores(RowWish[tuple[int, int]]):
    """Log-probability of each token of a prompt.

    A chunk's first token is predicted by the last vector of the chunk before it, which is kept.
    Wish of a row: the length of its prompt, and the number of most likely tokens it wants at each
    place.
    """

    def __init__(self, rows: Rows, head: Head) -> None:
        """Use `head`: hidden [R, D] → fp32 logits [R, V]."""
        super().__init__()
        self._table, self._head = rows, head
        self._last: dict[int, tuple[int, Array]] = {}
        """By row, the position of the last vector computed, and the vector [1, D]."""

    def wish(self, admission: Admission) -> tuple[int, int] | None:
        """Return the wish of choice 0, which scores for all choices of a request."""
        top = admission.spec.sampling.prompt_logprobs
        if top is None or admission.choice:
            return None
        return admission.prompt_length, top

    def release(self, rows: Sequence[int]) -> None:
        super().release(rows)
        for row in rows:
            self._last.pop(row, None)

    def wants(self, plan: StepPlan) -> Want:
        return EVERY if self._scored(plan) else NOTHING

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        """Write the scores of each entry's prompt tokens, without the prompt's first; hidden [N,
        D].

        A chunk that follows a prefix hit gets an empty list: the vector that predicts its first
        token was not computed here.
        """
        scored = self._scored(plan)
        if not scored:
            return
        hidden = outputs.hidden
        assert hidden is not None
        known = self._table
        table = known.host_tokens if isinstance(hidden, np.ndarray) else tensor(known.tokens)
        result.prompt_logprobs = [[] for _ in plan.rows]
        begins = np.concatenate([[0], np.cumsum(plan.counts)])
        for entry in scored:
            row, start = plan.rows[entry], plan.starts[entry]
            length, top = self._rows[row]
            vectors = hidden[begins[entry] : begins[entry + 1]]
            position, before = self._last.get(row, (-1, vectors[:0]))
            self._last[row] = (start + len(vectors) - 1, copy(vectors[-1:]))
            if start and position != start - 1:
                continue
            end = min(start + len(vectors), length)
            result.prompt_logprobs[entry] = self._entry(
                concatenate([before, vectors]) if start else vectors,
                int64(table[row, max(start, 1) : end]),
                top,
            )

    def _scored(self, plan: StepPlan) -> list[int]:
        """List the entries that compute part of such a prompt."""
        return [
            entry
            for entry, (row, start) in enumerate(zip(plan.rows, plan.starts, strict=True))
            if row in self._rows and start < self._rows[row][0]
        ]

    def _entry(self, vectors: Array, following: Array, top: int) -> list[TokenLogprobs]:
        """Score tokens: vectors[i] predicts following[i]."""
        scores: list[TokenLogprobs] = []
        for low in range(0, len(following), LOGIT_ROWS):
            tokens = following[low : low + LOGIT_ROWS]
            logits = self._head(vectors[low : low + len(tokens)])
            scores += log_probabilities(logits, tokens, np.full(len(tokens), top))
        return scores

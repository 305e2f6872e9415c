"""Log-probabilities of prompt tokens, for the rows that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..base.step import StepPlan, TokenLogprobs
from ..kernels.arrays import Array, tensor
from .arrays import concatenate, copy, int64
from .sampler import log_probabilities

if TYPE_CHECKING:
    from ..kernels.program import Program
    from .rows import Rows

LOGIT_ROWS = 64
"""Rows of logits held at once: a long chunk times a large vocabulary would be gigabytes."""


class PromptScores:
    """A chunk's first token is predicted by the chunk before it: that one's last vector is kept."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._last: dict[int, tuple[int, Array]] = {}
        """Per row: the position of the last vector computed, and the vector [1, D]."""

    def release(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._last.pop(row, None)

    def wanted(self, plan: StepPlan) -> list[int]:
        """The entries whose hidden states, of every token, `score` will read: choice 0 scores for
        all choices of a request."""
        if not self._rows.scoring:
            return []
        columns = self._rows.columns[plan.rows]
        wanted = (columns["prompt_logprobs"] >= 0) & (columns["choice"] == 0)
        wanted &= np.asarray(plan.starts) < columns["prompt_length"]
        found: list[int] = np.flatnonzero(wanted).tolist()
        return found

    def score(
        self, plan: StepPlan, wanted: Sequence[int], program: Program, hidden: Array
    ) -> list[list[TokenLogprobs]] | None:
        """Per entry, of each prompt token of its chunk but the prompt's first; hidden [N, D].

        `wanted` is what the method of that name gave. A chunk that follows a prefix hit gets an
        empty list: what predicts its first token was not computed here.
        """
        if not wanted:
            return None
        columns = self._rows.columns[plan.rows]
        table = (
            self._rows.host_tokens if isinstance(hidden, np.ndarray) else tensor(self._rows.tokens)
        )
        result: list[list[TokenLogprobs]] = [[] for _ in plan.rows]
        begins = np.concatenate([[0], np.cumsum(plan.counts)])
        for entry in wanted:
            row, start = plan.rows[entry], plan.starts[entry]
            vectors = hidden[begins[entry] : begins[entry + 1]]
            position, before = self._last.get(row, (-1, vectors[:0]))
            self._last[row] = (start + len(vectors) - 1, copy(vectors[-1:]))
            if start and position != start - 1:
                continue
            end = min(start + len(vectors), int(columns[entry]["prompt_length"]))
            result[entry] = self._entry(
                program,
                concatenate([before, vectors]) if start else vectors,
                int64(table[row, max(start, 1) : end]),
                int(columns[entry]["prompt_logprobs"]),
            )
        return result

    def _entry(
        self, program: Program, vectors: Array, following: Array, top: int
    ) -> list[TokenLogprobs]:
        """vectors[i] predicts following[i]."""
        scores: list[TokenLogprobs] = []
        for low in range(0, len(following), LOGIT_ROWS):
            tokens = following[low : low + LOGIT_ROWS]
            logits = program.head(vectors[low : low + len(tokens)])
            scores += log_probabilities(logits, tokens, np.full(len(tokens), top))
        return scores

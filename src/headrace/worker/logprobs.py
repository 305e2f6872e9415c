"""Log-probabilities of chosen tokens and of prompts, by the raw distribution."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..base.step import Admission, StepPlan, StepResult, TokenLogprobs
from ..kernels import host_sampling
from ..kernels.arrays import Array
from ..kernels.program import LOGITS, Outputs
from .arrays import like
from .features import Indices, RowWish


class Logprobs(RowWish[int]):
    """Log-probabilities of the chosen tokens.

    A step's raw logits of the rows that ask are kept before anything is masked. Wish of a row: the
    number of most likely tokens it wants in addition to its own.
    """

    want = LOGITS

    def __init__(self) -> None:
        super().__init__()
        self._kept: tuple[Array, npt.NDArray[np.int64], list[int]] | None = None
        """Raw logits [A, V], their places among the sampled rows [A], and the rows."""

    def wish(self, admission: Admission) -> int | None:
        return admission.spec.sampling.logprobs

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        asked = [row in self._rows for row in rows.tolist()]
        some = np.flatnonzero(asked)
        if len(some):
            self._kept = logits[like(some, logits)], some, rows[some].tolist()

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        kept, self._kept = self._kept, None
        if kept is None:
            return
        raw, some, rows = kept
        assert outputs.tokens is not None
        top = np.array([self._rows[row] for row in rows])
        found = log_probabilities(raw, outputs.tokens[like(some, raw)], top)
        result.logprobs = [[] for _ in plan.rows]
        for row, one in zip(rows, found, strict=True):
            result.logprobs[plan.rows.index(row)].append(one)


def log_probabilities(
    logits: Array, tokens: Array, top: npt.NDArray[np.int64]
) -> list[TokenLogprobs]:
    """Compute log-probabilities of tokens [R] from raw logits [R, V], with row r's top[r] most
    likely."""
    most = min(int(top.max()), logits.shape[1])
    if isinstance(logits, np.ndarray):
        found = host_sampling.log_probabilities(logits, tokens, most)
    else:
        from ..kernels import sampling  # Local: it computes on tensors.

        found = sampling.log_probabilities(logits, tokens, most)
    return [
        TokenLogprobs(logprob, rank, ids[:count], values[:count])
        for logprob, rank, ids, values, count in zip(
            found.logprobs, found.ranks, found.top_ids, found.top_logprobs, top, strict=True
        )
    ]

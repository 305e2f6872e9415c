"""Continuations of beams: the best legal tokens over all beams of a search in a step.

A beam's score is the sum of its tokens' log-probabilities by the raw distribution over the whole
vocabulary, in fp64; no token of a beam is sampled. The trie says which tokens are legal; only their
logits are read, so no pass over beams and vocabulary writes a mask. A step returns the best of each
search's beams in it, which are at most as many as the search keeps.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np
import numpy.typing as npt

from ..base.items import BeamRow
from ..base.outputs import Continuations
from ..base.step import Admission, StepPlan, StepResult
from ..kernels import host_sampling
from ..kernels.arrays import Array
from ..kernels.program import LOGITS, Outputs
from .arrays import like
from .features import Indices, RowWish


class Beams(RowWish[BeamRow]):
    """The beam of each row that has one."""

    want = LOGITS

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, Continuations | None] = {}
        """By row: the continuations of this step; None if the logits are no numbers."""

    def wish(self, admission: Admission) -> BeamRow | None:
        return admission.spec.beam

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        """Choose the continuations while the logits are raw; nothing is masked."""
        mine = [
            (self._rows[row].search, at, row)
            for at, row in enumerate(rows.tolist())
            if row in self._rows
        ]
        for _, group in groupby(sorted(mine), key=lambda one: one[0]):
            _, some, its = zip(*group, strict=True)
            self._search(logits[like(np.array(some), logits)], its)

    def _search(self, logits: Array, rows: tuple[int, ...]) -> None:
        """Choose among all legal continuations of a search's beams, with logits [B, V]."""
        wishes = [self._rows[row] for row in rows]
        legal = [np.frombuffer(one.legal, np.int32).astype(np.int64) for one in wishes]
        entries = np.repeat(np.arange(len(rows)), [len(ids) for ids in legal])
        tokens = np.concatenate(legal)
        norms, raw = _read(logits, entries, tokens)
        values = np.array([one.score for one in wishes])[entries] + (raw - norms[entries])
        beams = np.array([one.place for one in wishes])[entries]
        best = host_sampling.best_beams(values, beams, tokens, wishes[0].most)
        for entry, row in enumerate(rows):
            own = best[entries[best] == entry]
            found = Continuations(tokens[own].tolist(), values[own].tolist())
            self._found[row] = found if np.isfinite(norms[entry]) else None

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        found, self._found = self._found, {}
        for entry, row in enumerate(plan.rows):
            if row in found:
                if (one := found[row]) is None:
                    result.spoiled[entry] = "the model's numbers are not finite for these beams"
                else:
                    result.outputs = {**(result.outputs or {}), entry: one}


def _read(
    logits: Array, entries: Indices, tokens: Indices
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return each row's normaliser [B], and the logits of these entries and tokens [N], fp64."""
    if isinstance(logits, np.ndarray):
        return host_sampling.normalisers(logits), logits[entries, tokens].astype(np.float64)
    raw = logits[like(entries, logits), like(tokens, logits)]
    return logits.logsumexp(-1).double().cpu().numpy(), raw.double().cpu().numpy()

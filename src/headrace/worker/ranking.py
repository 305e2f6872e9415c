"""Scores of candidates, for the rows that rank: their features in a step, and what comes out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.outputs import Scores
from ..base.ranking import BagColumn, Feature, Ranker, RankingInput, blank
from ..base.step import Admission, StepPlan, StepResult
from ..kernels.program import EVERY, Outputs
from ..kernels.ranked import BagRows, RankedRows
from .arrays import fp32
from .features import RowWish

Ids = npt.NDArray[np.int64]


class _Ranked(NamedTuple):
    """A request on its way: its features, and the scores of its first candidates."""

    numbers: npt.NDArray[np.float32]
    """[candidates, dense features]."""
    bags: list[BagRows]
    scores: list[float]


class CandidateScores(RowWish[_Ranked]):
    """Scores [candidates] of each row that wants them, over as many steps as it takes."""

    want = EVERY

    def __init__(self, ranker: Ranker) -> None:
        super().__init__()
        self._ranker = ranker

    def wish(self, admission: Admission) -> _Ranked | None:
        given = admission.spec.ranking
        return None if given is None else self._opened(given, admission.prompt_length)

    def _opened(self, given: RankingInput, candidates: int) -> _Ranked:
        numbers = np.frombuffer(given.numbers, np.float32).reshape(candidates, -1)
        columns = zip(self._ranker.sparse, given.bags, strict=True)
        return _Ranked(numbers, [_bags(one, column) for one, column in columns], [])

    def rows_of(self, plan: StepPlan) -> RankedRows:
        """Return the features of a step's candidates. A row without any, of a step that nobody
        reads, has empty ones."""
        entries = [
            self._rows.get(row) or self._opened(blank(self._ranker, start + count), start + count)
            for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True)
        ]
        cuts = [slice(start, start + n) for start, n in zip(plan.starts, plan.counts, strict=True)]
        numbers = [one.numbers[cut] for one, cut in zip(entries, cuts, strict=True)]
        made = []
        for at, feature in enumerate(self._ranker.sparse):
            own = [one.bags[at] for one in entries]
            if not feature.shared:
                own = [_cut(bag, cut) for bag, cut in zip(own, cuts, strict=True)]
            made.append(_together(own, plan.counts if feature.shared else None))
        return RankedRows(np.concatenate(numbers), tuple(made))

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        """Take the scores [N, 1] of a step, and write those of complete requests into its
        result."""
        assert outputs.hidden is not None
        scores, begin = fp32(outputs.hidden)[:, 0].tolist(), 0
        found = dict(result.outputs or {})
        for entry, (row, start, count) in enumerate(
            zip(plan.rows, plan.starts, plan.counts, strict=True)
        ):
            ranked = self._rows.get(row)
            if ranked is not None:
                ranked.scores[start:] = scores[begin : begin + count]
                if len(ranked.scores) == len(ranked.numbers):
                    found[entry] = Scores(ranked.scores)
            begin += count
        result.outputs = found


def _bags(feature: Feature, column: BagColumn) -> BagRows:
    weights = np.frombuffer(column.weights, np.float32) if feature.weighted else None
    ids, starts = (np.frombuffer(one, np.int64) for one in (column.ids, column.starts))
    return BagRows(ids, starts, weights, None)


def _cut(bags: BagRows, cut: slice) -> BagRows:
    """Return the bags of some candidates, one after the other."""
    starts = bags.starts[cut.start : cut.stop + 1]
    ids = slice(starts[0], starts[-1])
    weights = None if bags.weights is None else bags.weights[ids]
    return BagRows(bags.ids[ids], starts - starts[0], weights, None)


def _together(bags: list[BagRows], counts: list[int] | None) -> BagRows:
    """Return the bags of all entries of a step; `counts`: of the rows that share an entry's one
    bag."""
    starts, end = [np.zeros(1, np.int64)], 0
    for one in bags:
        starts.append(one.starts[1:] + end)
        end += len(one.ids)
    weights = [one.weights for one in bags if one.weights is not None]
    return BagRows(
        np.concatenate([one.ids for one in bags]),
        np.concatenate(starts),
        np.concatenate(weights) if weights else None,
        None if counts is None else np.repeat(np.arange(len(bags)), counts),
    )

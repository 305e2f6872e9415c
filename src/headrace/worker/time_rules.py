"""Rules for the next token of a transcription: suppressed ids and the grammar of timestamps.

The rules are those of OpenAI's code (github.com/openai/whisper, MIT, `ApplyTimestampRules`). Times
come in pairs except before the end, and never go back. The first is at most one second in. If all
times together are likelier than any word, a time is next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..base.spec import TimeRules
from ..base.step import Admission, StepPlan, StepResult, TokenLogprobs
from ..kernels.arrays import Array, host
from ..kernels.program import LOGITS, Outputs
from ..loader.whisper_files import FIRST_TIMES
from .features import Indices, RowWish
from .rows import Rows

Floats = npt.NDArray[np.float32]


class RulesOfRow:
    """The rules of one row, with their ids in arrays."""

    def __init__(self, given: TimeRules) -> None:
        self.given = given
        self._never = np.array(given.never, np.int64)
        self._first = np.array(given.never_first, np.int64)

    def log_shares(self, logits: Floats, said: Sequence[int]) -> Floats:
        """Compute log softmax of logits [V] over the ids that may follow `said`; -inf for
        others."""
        x = logits.astype(np.float32, copy=True)
        x[self._never] = -np.inf
        if not said:
            x[self._first] = -np.inf
        if self.given.times:
            self._apply_times(x, said)
        first = self.given.first_time
        x -= x.max()
        shares = np.exp(x)
        total, times = float(shares.sum()), float(shares[first:].sum())
        if self.given.times and times and np.log(times) > x[:first].max():
            x[:first], total = -np.inf, times
        x -= np.float32(np.log(total))
        return x

    def _apply_times(self, x: Floats, said: Sequence[int]) -> None:
        first, end = self.given.first_time, self.given.end
        if not said:
            x[:first] = -np.inf
            x[first + FIRST_TIMES :] = -np.inf
            return
        is_time = [token >= first for token in said[-2:]]
        if is_time[-1]:
            if len(said) < 2 or is_time[0]:
                x[first:] = -np.inf
            else:
                x[:end] = -np.inf
        earlier = [token for token in said if token >= first]
        if earlier:
            # An open segment may not end where it began.
            forced = is_time[-1] and not (len(said) < 2 or is_time[0])
            x[first : earlier[-1] + (0 if forced else 1)] = -np.inf


class _RuledToken(NamedTuple):
    row: int
    place: int
    """Place among the step's sampled rows."""
    shares: Floats


class TimedText(RowWish[RulesOfRow]):
    """Log-probabilities under a row's rules in place of its logits, and those of its tokens among
    the outputs, in place of raw ones."""

    want = LOGITS

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._table = rows
        self._drawn: list[_RuledToken] = []

    def wish(self, admission: Admission) -> RulesOfRow | None:
        given = admission.spec.rules
        return None if given is None else RulesOfRow(given)

    def mask(self, logits: Array, rows: Indices, places: Indices) -> None:
        self._drawn = []
        numbers = host(logits)
        for index, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
            rules = self._rows.get(row)
            if rules is not None:
                said = self._table.host_tokens[row, rules.given.begin : place].tolist()
                numbers[index] = shares = rules.log_shares(numbers[index], said)
                self._drawn.append(_RuledToken(row, index, shares))

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        drawn, self._drawn = self._drawn, []
        if not drawn:
            return
        assert outputs.tokens is not None
        tokens = host(outputs.tokens)
        if result.logprobs is None:
            result.logprobs = [[] for _ in plan.rows]
        for row, place, shares in drawn:
            most = self._rows[row].given.most
            found = _log_probability(shares, int(tokens[place]), most)
            result.logprobs[plan.rows.index(row)] = [found]


def _log_probability(shares: Floats, token: int, most: int) -> TokenLogprobs:
    """Return a token's number among all, and the `most` likeliest in any order."""
    own = float(shares[token])
    top = np.argpartition(-shares, most - 1)[:most] if most else np.zeros(0, np.int64)
    rank = 1 + int((shares > shares[token]).sum())
    return TokenLogprobs(own, rank, top.tolist(), shares[top].tolist())

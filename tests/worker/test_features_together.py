"""Requests of rows beyond a token: one list, in the order of the masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission, BlockWrite, StepPlan, StepResult
from headrace.kernels.program import EVERY, LOGITS, Outputs, Want, want
from headrace.worker import Worker
from headrace.worker.bans import AllowedTokens, BadWords
from headrace.worker.beams import Beams
from headrace.worker.features import Features, RowFeature
from headrace.worker.filters import Filters
from headrace.worker.logprobs import Logprobs
from headrace.worker.masks import LogitBias, MinTokens, Penalties
from headrace.worker.pooling import Pooler
from headrace.worker.prompt_scores import PromptScores
from headrace.worker.reasoning import ReasoningBudgets
from headrace.worker.rows import Rows
from headrace.worker.time_rules import TimedText
from oracle.driving import Driver, pool_of


def admission(row: int, **asked: Any) -> Admission:
    spec = RequestSpec(SamplingParams(temperature=0, **asked), 0, stop_ids=(1, 2))
    return Admission(row, row, [5, 6, 7], 3, 0, spec)


class Noting(RowFeature):
    """Notes every call, for rows whose `min_tokens` is its number."""

    def __init__(self, number: int, wanted: Want, calls: list[tuple[int, str]]) -> None:
        self.number, self.wanted, self.calls = number, wanted, calls

    def admit(self, admission: Admission) -> bool:
        return admission.spec.sampling.min_tokens == self.number

    def release(self, rows: Sequence[int]) -> None:
        self.calls.append((self.number, "release"))

    def wants(self, plan: StepPlan) -> Want:
        self.calls.append((self.number, "wants"))
        return self.wanted

    def mask(self, logits: Any, rows: Any, places: Any) -> None:
        self.calls.append((self.number, "mask"))

    def advance(self, rows: Any, arrived: Any) -> Mapping[int, str]:
        self.calls.append((self.number, "advance"))
        return {self.number: "void"}

    def collect(self, plan: StepPlan, outputs: Outputs, result: StepResult) -> None:
        self.calls.append((self.number, "collect"))


def test_a_step_pays_for_what_its_rows_ask() -> None:
    calls: list[tuple[int, str]] = []
    listed = [Noting(n, w, calls) for n, w in enumerate((LOGITS, EVERY, LOGITS, want()))]
    features = Features(listed, 8)
    for row, number in ((0, 9), (1, 1), (2, 3), (3, 0)):
        features.admit(admission(row, min_tokens=number))
    assert features.rows == {1, 2, 3}, "row 0 asks for nothing"
    plan = StepPlan(0, [0], [0], [1], [True])
    assert features.of([0]).features == ()
    assert features.of([0]).wants(plan) == (False, "none")
    asked = features.of([2, 0, 1])
    assert asked.features == (listed[1], listed[3]), "in the order of the list"
    assert asked.wants(plan) == (False, "every")
    rows = np.array([2, 1])
    asked.mask(None, rows, rows)
    assert asked.advance(rows, list) == {1: "void", 3: "void"}
    asked.collect(plan, Outputs(), StepResult(0, []))
    verbs = ("wants", "mask", "advance", "collect")
    assert calls == [(number, verb) for verb in verbs for number in (1, 3)]
    assert features.of([3]).wants(plan) == (True, "none")
    features.release([1, 3])
    assert features.rows == {2}
    assert features.of([1, 3]).features == ()
    features.admit(admission(1, min_tokens=2))
    assert features.of([1]).features == (listed[2],), "nothing is left of who had the row"


def test_the_order_of_a_workers_list(worker: Worker) -> None:
    """Raw logits first; what forbids before what moves; `min_tokens` sees what others left."""
    worker.allocate(pool_of(worker, 8))
    kinds = [type(feature) for feature in worker._steps.features.listed]
    assert kinds == [
        Beams,
        Logprobs,
        TimedText,
        ReasoningBudgets,
        AllowedTokens,
        BadWords,
        MinTokens,
        LogitBias,
        Penalties,
        Filters,
        Pooler,
        PromptScores,
    ]


def test_masks_in_their_order() -> None:
    """Log-probabilities are of the raw logits; a forbidden id stays forbidden whatever is added to
    it; penalties count what the bias left."""
    rows = Rows(1, 16, "cpu")
    listed = [Logprobs(), MinTokens(), LogitBias(), Penalties(rows)]
    features = Features(listed, 1)
    one = admission(
        0, logprobs=0, min_tokens=2, logit_bias={1: 50.0, 5: 1.0}, repetition_penalty=2.0
    )
    rows.admit(one)
    features.admit(one)
    asked = features.of([0])
    raw = np.arange(10, dtype=np.float32)[None] / 10
    logits = raw.copy()
    asked.mask(logits, np.array([0]), np.array([3]))
    expected = raw.copy()
    expected[0, [1, 2]] = -np.inf
    expected[0, 5] = (raw[0, 5] + 1) / 2
    expected[0, [6, 7]] /= 2
    np.testing.assert_array_equal(logits, expected)
    result = StepResult(0, [[]])
    plan = StepPlan(0, [0], [2], [1], [True])
    asked.collect(plan, Outputs(np.array([5]), logits), result)
    assert result.logprobs is not None
    log_softmax = raw[0] - np.log(np.exp(raw[0]).sum())
    assert result.logprobs[0][0].logprob == pytest.approx(log_softmax[5], abs=1e-6)
    assert result.logprobs[0][0].rank == 5


def test_a_plans_starts_are_what_is_computed(worker: Worker) -> None:
    driver = Driver(worker)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0, max_tokens=8))
    for _ in range(3):
        driver.step()
    (row,) = driver.plans[-1].rows
    assert worker._rows.computed[row] == 5
    wrong = StepPlan(9, [row], [6], [1], [True], blocks=[BlockWrite(row, 0, 0, [1])])
    assert "computed [5], not [6]" in (worker.execute(wrong).error or "")

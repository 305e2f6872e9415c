"""Logits as a numpy array and as a tensor: the same tokens, by the same changes, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from headrace.base.sampling import SamplingParams
from headrace.base.spec import ReasoningBudget, RequestSpec
from headrace.base.step import Admission, StepPlan, StepResult
from headrace.kernels import host_sampling
from headrace.kernels.draws import Drawing, by_rules
from headrace.kernels.program import Outputs
from headrace.kernels.sampling import REFERENCE
from headrace.worker.features import Asked, Features, RowFeature
from headrace.worker.grammar import Form, GrammarMasks
from headrace.worker.logprobs import Logprobs
from headrace.worker.masks import LogitBias, MinTokens, Penalties
from headrace.worker.reasoning import ReasoningBudgets
from headrace.worker.rows import Rows

HOST = Drawing(host_sampling.draw, host_sampling.argmax)
ROWS, VOCAB, CONTEXT = 14, 500, 64


def asked(pick: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=pick.choice([0.0, 0.0, 0.4, 1.0, 2.0]),
        top_k=pick.choice([0, 0, 5, 40, VOCAB]),
        top_p=pick.choice([1.0, 0.9, 0.3]),
        min_p=pick.choice([0.0, 0.0, 0.1]),
        repetition_penalty=pick.choice([1.0, 1.0, 1.4, 0.8]),
        presence_penalty=pick.choice([0.0, 0.0, 0.7]),
        frequency_penalty=pick.choice([0.0, 0.0, -0.5]),
        logit_bias=pick.choice([{}, {}, {3: 5.0, 400: -100.0, 7: 1.5}]),
        seed=pick.randrange(2**40),
        min_tokens=pick.choice([0, 0, 8, 60]),
        logprobs=pick.choice([None, None, 0, 4]),
    )


def admission(row: int, pick: random.Random, sampling: SamplingParams) -> Admission:
    length = pick.randrange(1, CONTEXT - 1)
    prompt = pick.randrange(1, length + 1)
    budget = pick.choice([None, None, ReasoningBudget(2, open=1, close=2, inside=True)])
    tokens = [pick.randrange(3, 60) for _ in range(length)]
    stop_ids = pick.choice([(), (0, 9), (17,)])
    spec = RequestSpec(sampling, sampling.seed or 0, stop_ids, reasoning=budget)
    return Admission(row, row, tokens, prompt, pick.randrange(3), spec)


class NoCompiler:
    """Forms come from the test, not from a grammar."""


def masks(forbidden: dict[int, np.ndarray], on_host: bool) -> GrammarMasks:
    made = GrammarMasks(NoCompiler(), VOCAB, on_host=on_host)  # type: ignore[arg-type]
    for row, flags in forbidden.items():
        form = made._forms[row] = Form()
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[:VOCAB] = ~flags
        form.masks = [made._made(np.packbits(bits, bitorder="little").view(np.int32))]
        form.coming = made._threads.submit(lambda: None)
    made._threads.shutdown()
    return made


def sampled(
    admitted: list[Admission],
    grammar: GrammarMasks,
    drawing: Drawing,
    logits: Any,
    chosen: np.ndarray,
) -> tuple[Any, StepResult]:
    """Tokens and log-probabilities of a step, through the features in the worker's order."""
    rows = Rows(ROWS, CONTEXT, "cpu", ("grammar",))
    listed: list[RowFeature] = [
        Logprobs(),
        ReasoningBudgets(rows),
        MinTokens(),
        LogitBias(),
        Penalties(rows),
    ]
    features = Features(listed, ROWS)
    for one in admitted:
        rows.admit(one)
        features.admit(one)
    first, *rest = listed
    asked = Asked((first, grammar, *rest))
    places = np.array([len(admitted[row].tokens) for row in chosen])
    asked.mask(logits, chosen, places)
    rules = rows.rules(chosen)
    assert rules is not None
    tokens = by_rules(drawing, logits, rules, places)
    plan = StepPlan(0, chosen.tolist(), [0] * len(chosen), [1] * len(chosen), [True] * len(chosen))
    result = StepResult(0, [[] for _ in chosen])
    asked.collect(plan, Outputs(tokens, logits), result)
    return tokens, result


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("bound", [False, True], ids=["free", "masked"])
@pytest.mark.parametrize("on_host", [True, False])
def test_the_same_tokens_of_a_step(seed: int, bound: bool, on_host: bool) -> None:
    pick, numbers = random.Random(seed), np.random.default_rng(seed)
    admitted = [admission(row, pick, asked(pick)) for row in range(ROWS)]
    forbidden: dict[int, np.ndarray] = {}
    for row in (2, 5, 6) if bound else ():
        forbidden[row] = numbers.random(VOCAB) < 0.97
        # Also a row to which its form leaves nothing but an end.
        forbidden[row][:] |= row == 6
        forbidden[row][17] = False
    chosen = np.array(pick.sample(range(ROWS), 9))
    logits = (numbers.standard_normal((len(chosen), VOCAB)) * 3).astype(np.float32)

    tensor, array = torch.from_numpy(logits.copy()), logits.copy()
    expected, theirs_too = sampled(admitted, masks(forbidden, on_host), REFERENCE, tensor, chosen)
    tokens, ours_too = sampled(admitted, masks(forbidden, True), HOST, array, chosen)
    logprobs, expected_logprobs = ours_too.logprobs, theirs_too.logprobs

    assert isinstance(tokens, np.ndarray)
    assert tokens.dtype == np.int64
    np.testing.assert_array_equal(array, tensor.numpy())
    assert (array != logits).any()
    assert tokens.tolist() == expected.tolist()
    assert (logprobs is None) == (expected_logprobs is None)
    for mine, others in zip(logprobs or [], expected_logprobs or [], strict=True):
        assert len(mine) == len(others) <= 1
        for ours, theirs in zip(mine, others, strict=True):
            assert ours.rank == theirs.rank
            assert ours.top_ids == theirs.top_ids
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-5)

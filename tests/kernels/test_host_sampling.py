"""Numpy and torch agree: penalties bit for bit, log-probabilities with their ties, the draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from test_sampling_operators import CASES, kept_by_definition, parameters

from headrace.kernels import host_sampling, sampling
from headrace.kernels.draws import DrawParameters

COARSE = st.sampled_from([-np.inf, -3.0, -1.5, -0.0, 0.0, 0.25, 2.0, 40.0])
"""Few values: many ties."""


def logits_of(rows: st.SearchStrategy, widths: st.SearchStrategy) -> st.SearchStrategy:
    values = st.one_of(st.just(COARSE), st.just(st.floats(-50, 50, width=32) | st.just(-np.inf)))
    return st.tuples(rows, widths, values).flatmap(
        lambda one: arrays.arrays(np.float32, one[:2], elements=one[2])
    )


def on_host(asked: DrawParameters) -> DrawParameters:
    return DrawParameters(**{n: getattr(asked, n).numpy() for n in DrawParameters.__slots__})


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_penalties_bit_for_bit(data: st.DataObject) -> None:
    logits = data.draw(logits_of(st.integers(1, 4), st.integers(1, 40)))
    rows, vocabulary = logits.shape
    width = data.draw(st.integers(0, 30))
    tokens = data.draw(
        arrays.arrays(np.int32, (rows, width), elements=st.integers(0, vocabulary - 1))
    )
    lengths = np.array([data.draw(st.integers(0, width)) for _ in range(rows)], np.int64)
    # Also at its borders: nothing is output, or everything.
    prompts = np.array([data.draw(st.integers(0, length)) for length in lengths], np.int64)
    columns = [
        np.array([data.draw(st.sampled_from(values)) for _ in range(rows)], np.float32)
        for values in ([1.0, 1.3, 0.7, 2.0], [0.0, 0.6, -1.5], [0.0, 0.3, -2.0])
    ]
    expected = sampling.penalise(
        *(torch.from_numpy(each) for each in (logits, tokens, prompts, lengths, *columns))
    )
    # The rows of a larger step, whose others nobody touches.
    step = np.full((rows + 2, vocabulary), 7, np.float32)
    places = np.arange(rows)[::-1] + 1
    step[places] = logits
    host_sampling.penalise_rows(step, places, tokens, prompts, lengths, *columns)
    np.testing.assert_array_equal(step[places], expected.numpy())
    assert (step[[0, -1]] == 7).all()


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_log_probabilities_with_their_ties(data: st.DataObject) -> None:
    logits = data.draw(logits_of(st.integers(1, 3), st.integers(1, 60)))
    rows, vocabulary = logits.shape
    tokens = np.array([data.draw(st.integers(0, vocabulary - 1)) for _ in range(rows)], np.int64)
    top = data.draw(st.sampled_from([0, 1, vocabulary]) | st.integers(0, vocabulary))
    agree(logits, tokens, top)


@pytest.mark.parametrize("vocabulary", [5_000, 151_936])
@pytest.mark.parametrize("top", [0, 1, 20, 40])
def test_a_large_vocabulary_with_ties(vocabulary: int, top: int) -> None:
    """Logits of fp16, as a quantised head might give: ties at every place of the order."""
    pick = np.random.default_rng(0)
    logits = (pick.standard_normal((6, vocabulary)) * 3).astype(np.float16).astype(np.float32)
    logits[1] = logits[1].round()
    logits[2, 1:] = -np.inf
    logits[3] = 0
    logits[4, ::3] = -np.inf
    agree(logits, pick.integers(0, vocabulary, 6), top)


def agree(logits: np.ndarray, tokens: np.ndarray, top: int) -> None:
    ours = host_sampling.log_probabilities(logits, tokens, top)
    theirs = sampling.log_probabilities(torch.from_numpy(logits), torch.from_numpy(tokens), top)
    assert ours.ranks == theirs.ranks
    assert ours.top_ids == theirs.top_ids
    by_definition = [np.lexsort((np.arange(len(line)), -line))[:top].tolist() for line in logits]
    assert ours.top_ids == by_definition
    near = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, **near)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, **near)
    exact = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    # Closer to the truth than fp32 could be told apart at these logits.
    np.testing.assert_allclose(
        ours.logprobs, exact[np.arange(len(tokens)), tokens], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers(bad: float) -> None:
    """The row's own log-probabilities are void, of the right length, and no neighbour's."""
    logits = np.random.default_rng(0).standard_normal((3, 3000)).astype(np.float32)
    logits[1, 5:] = bad
    found = host_sampling.log_probabilities(logits, np.array([1, 7, 2]), 4)
    alone = host_sampling.log_probabilities(logits[::2], np.array([1, 2]), 4)
    assert found.logprobs[::2] == alone.logprobs
    assert found.top_ids[::2] == alone.top_ids
    assert [len(ids) for ids in found.top_ids] == [4, 4, 4]
    assert all(0 <= token < 3000 for token in found.top_ids[1])
    asked = on_host(parameters(3, top_p=0.9, top_k=50, uniform=0.3))
    assert 0 <= host_sampling.draw(logits, asked)[1] < 3000


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("spread", [0.3, 4.0], ids=["flat", "peaked"])
def test_the_distribution_of_the_draw(case: dict, spread: float) -> None:
    vocabulary, draws = 700, 500
    logits = (np.random.default_rng(0).standard_normal(vocabulary) * spread).astype(np.float32)
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **case}
    expected = kept_by_definition(logits, **values)
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    asked = on_host(parameters(draws, uniform=grid, **case))
    tokens = host_sampling.draw(np.tile(logits, (draws, 1)), asked)
    got = np.bincount(tokens, minlength=vocabulary) / draws
    assert np.abs(got - expected).max() <= 2.5 / draws
    assert not got[expected == 0].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_draw_of_the_reference(case: dict) -> None:
    pick = np.random.default_rng(1)
    logits = (pick.standard_normal((60, 2000)) * pick.uniform(0.2, 6, (60, 1))).astype(np.float32)
    logits[::2] = (logits[::2] * 4).round() / 4
    asked = parameters(60, uniform=torch.from_numpy(pick.random(60)), **case)
    ours = host_sampling.draw(logits, on_host(asked))
    # Exponentials of another library end an interval a hair earlier or later.
    assert (ours != sampling.draw(torch.from_numpy(logits), asked).numpy()).sum() <= 1


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ends_of_the_interval(case: dict, uniform: float) -> None:
    logits = (np.random.default_rng(0).standard_normal((1, 2000)) * 3).astype(np.float32)
    logits[0, [0, -1]] = -np.inf
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **case}
    expected = np.flatnonzero(kept_by_definition(logits[0], **values))
    token = host_sampling.draw(logits, on_host(parameters(1, uniform=uniform, **case)))[0]
    assert token == expected[0 if uniform == 0 else -1]

"""Ids that are not drawn: outside a list, or the end of an unwanted word; by vLLM's definition."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TypicalLogitsWarper

from headrace.base.sampling import SamplingParams
from headrace.base.spec import RequestSpec
from headrace.base.step import Admission
from headrace.worker.bans import AllowedTokens, BadWords
from headrace.worker.features import Asked
from headrace.worker.filters import Filters
from headrace.worker.rows import Rows

VOCAB, CONTEXT = 40, 32
INF = math.inf


def admission(
    row: int, tokens: list[int], prompt: int, words: tuple[tuple[int, ...], ...] = (), **asked: Any
) -> Admission:
    spec = RequestSpec(SamplingParams(**{"temperature": 1.0, **asked}), 0, bad_words=words)
    return Admission(row, row, tokens, prompt, 0, spec)


def both(
    admitted: list[Admission], logits: np.ndarray[Any, np.dtype[np.float32]]
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The logits after the masks, as an array; the same as a tensor."""
    rows = Rows(len(admitted), CONTEXT, "cpu")
    listed = [AllowedTokens(), BadWords(rows)]
    for one in admitted:
        rows.admit(one)
        for feature in listed:
            feature.admit(one)
    chosen = np.arange(len(admitted))
    places = np.array([len(one.tokens) for one in admitted])
    array, tensor = logits.copy(), torch.from_numpy(logits.copy())
    for each in (array, tensor):
        Asked(tuple(listed)).mask(each, chosen, places)
    np.testing.assert_array_equal(array, tensor.numpy())
    return array


def banned_by_rule(words: tuple[tuple[int, ...], ...], answer: list[int]) -> set[int]:
    """vLLM's rule, from its description: the last id of a word whose others end the answer."""
    return {
        word[-1]
        for word in words
        if len(word) == 1
        or (
            len(answer) >= len(word) - 1
            and word[:-1] == tuple(answer[len(answer) - len(word) + 1 :])
        )
    }


@pytest.mark.parametrize("seed", range(40))
def test_the_id_that_would_complete_a_word(seed: int) -> None:
    pick = random.Random(seed)
    admitted, expected = [], []
    for row in range(6):
        prompt = pick.randrange(1, 8)
        tokens = [pick.randrange(4) for _ in range(prompt + pick.randrange(0, 8))]
        words = tuple(
            tuple(pick.randrange(4) for _ in range(pick.randrange(1, 5)))
            for _ in range(pick.randrange(0, 5))
        )
        admitted.append(admission(row, tokens, prompt, words))
        expected.append(banned_by_rule(words, tokens[prompt:]))
    logits = np.random.default_rng(seed).standard_normal((6, VOCAB)).astype(np.float32)
    found = both(admitted, logits)
    for row, banned in enumerate(expected):
        assert set(np.flatnonzero(found[row] == -INF).tolist()) == banned
        kept = [index for index in range(VOCAB) if index not in banned]
        np.testing.assert_array_equal(found[row, kept], logits[row, kept])


def test_the_prompt_does_not_begin_a_word() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    found = both([admission(0, [5, 6], 2, ((6, 7),)), admission(1, [5, 6], 1, ((6, 7),))], logits)
    assert found[0, 7] == 0
    assert found[1, 7] == -INF


def test_a_list_of_ids_and_words_within_it() -> None:
    logits = np.arange(2 * VOCAB, dtype=np.float32).reshape(2, VOCAB)
    found = both(
        [
            admission(0, [1], 1, ((3,),), allowed_token_ids=[3, 9, 3]),
            admission(1, [1], 1, ((3,), (9,)), allowed_token_ids=[9, 3]),
        ],
        logits,
    )
    assert np.flatnonzero(found[0] > -INF).tolist() == [9]
    assert np.flatnonzero(found[1] > -INF).tolist() == [3, 9], "a word is only unwanted"
    assert found[1, 3] == logits[1, 3]


def filtered(logits: np.ndarray[Any, np.dtype[np.float32]], **asked: Any) -> Any:
    """Logits [V] after the filters, as array and as tensor alike."""
    feature = Filters()
    if not feature.admit(admission(0, [1], 1, **asked)):
        return logits
    array, tensor = logits[None].copy(), torch.from_numpy(logits[None].copy())
    for each in (array, tensor):
        feature.mask(each, np.array([0]), np.array([1]))
    np.testing.assert_array_equal(array > -INF, tensor.numpy() > -INF)
    return array[0]


@pytest.mark.parametrize("mass", [0.05, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("seed", range(5))
def test_typical_as_the_oracle_has_it(seed: int, mass: float) -> None:
    logits = (np.random.default_rng(seed).standard_normal(VOCAB) * 3).astype(np.float32)
    logits[seed] = -INF
    expected = TypicalLogitsWarper(mass)(None, torch.from_numpy(logits[None].copy()))[0].numpy()
    kept = np.flatnonzero(filtered(logits, typical_p=mass) > -INF).tolist()
    assert kept == np.flatnonzero(expected > -INF).tolist()
    assert len(kept) < VOCAB - 1


@pytest.mark.parametrize("seed", range(5))
def test_top_a_and_sigma_by_their_definitions(seed: int) -> None:
    logits = (np.random.default_rng(seed).standard_normal(VOCAB) * 2).astype(np.float32)
    logits[seed] = -INF
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    kept = np.flatnonzero(filtered(logits, top_a=0.3) > -INF).tolist()
    assert kept == np.flatnonzero(p >= 0.3 * p.max() ** 2).tolist()
    known = logits[np.isfinite(logits)].astype(np.float64)
    kept = np.flatnonzero(filtered(logits, top_n_sigma=1.0) > -INF).tolist()
    assert kept == np.flatnonzero(logits >= known.max() - known.std()).tolist()
    assert 0 < len(kept) < VOCAB - 1


class Reads(TorchDispatchMode):
    """Counts what a host would wait for on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(each in name for each in ("_local_scalar_dense", "nonzero", "masked_select")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_filters_read_nothing_from_a_device() -> None:
    feature = Filters()
    asked = {"typical_p": 0.4, "top_a": 0.1, "top_n_sigma": 1.5}
    assert feature.admit(admission(0, [1], 1, **asked))
    logits = torch.randn(1, VOCAB)
    with Reads() as reads:
        feature.mask(logits, np.array([0]), np.array([1]))
    assert not reads.seen
    assert 0 < (logits > -INF).sum() < VOCAB
    with Reads() as reads:
        float(logits[0, 0])
    assert reads.seen, "a read is seen"


def test_greedy_and_unset_rows_do_not_ask() -> None:
    feature = Filters()
    assert not feature.admit(admission(0, [1], 1, typical_p=0.2, temperature=0.0))
    assert not feature.admit(admission(0, [1], 1, typical_p=1.0, top_n_sigma=-1.0))
    assert feature.admit(admission(0, [1], 1, top_a=0.1))
    feature.release([0])
    assert not AllowedTokens().admit(admission(0, [1], 1))

"""Filters, penalties and the draw, each against a plain float64 version of its definition."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.kernels import sampling
from headrace.kernels.draws import DrawParameters, uniforms
from headrace.kernels.sampling import draw, log_probabilities, penalise
from headrace.roofline import memory_parts
from headrace.worker.step_memory import SAMPLING_COPIES


def parameters(rows: int, **values) -> DrawParameters:
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5}
    types = {"top_k": torch.int64, "uniform": torch.float64}
    return DrawParameters(
        **{
            name: torch.as_tensor(values.get(name, default), dtype=types.get(name, torch.float32))
            .expand(rows)
            .contiguous()
            for name, default in defaults.items()
        }
    )


def kept_by_definition(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """Probabilities [V] in float64 after min-p, top-k and top-p, in this order."""
    # The division is done in fp32, as a GPU would: ties are made there.
    scaled = (logits.astype(np.float32) / np.float32(temperature)).astype(np.float64)
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    keep = probabilities >= min_p * probabilities.max() * (1 - 1e-6)
    if top_k:
        keep &= scaled >= np.sort(scaled)[::-1][min(top_k, len(scaled)) - 1]
    probabilities = np.where(keep, probabilities, 0) / probabilities[keep].sum()
    if top_p < 1:
        order = np.argsort(-probabilities, kind="stable")
        before = np.cumsum(probabilities[order]) - probabilities[order]
        last = scaled[order][before < top_p][-1]
        probabilities = np.where(scaled >= last, probabilities, 0)
    return probabilities / probabilities.sum()


def distribution(logits: torch.Tensor, draws: int, **values) -> np.ndarray:
    """Shares [V] of each token over an even grid of uniforms: the distribution, not a sample."""
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = torch.cat(
        [
            draw(
                logits.expand(len(part), -1).clone(), parameters(len(part), uniform=part, **values)
            )
            for part in grid.split(512)
        ]
    )
    return np.bincount(tokens.numpy(), minlength=logits.shape[-1]) / draws


CASES = [
    {},
    {"temperature": 0.4},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "temperature": 0.7},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocabulary", [50, 3000])
@pytest.mark.parametrize("spread", [0.3, 4.0], ids=["flat", "peaked"])
def test_distribution(case: dict, vocabulary: int, spread: float) -> None:
    """Flat over 3,000 tokens the nucleus outgrows the candidates: both ways are taken."""
    torch.manual_seed(0)
    logits = torch.randn(vocabulary) * spread
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **case}
    expected = kept_by_definition(logits.numpy(), **values)
    draws = 2000
    got = distribution(logits, draws, **case)
    # A token's interval on the grid is off by one point at each end.
    assert np.abs(got - expected).max() <= 2.5 / draws
    assert not got[expected == 0].any()


def test_draws_follow_the_distribution() -> None:
    """Chi-square over hashed uniforms, as the sampler makes them."""
    torch.manual_seed(0)
    logits = torch.randn(40)
    expected = torch.softmax(logits.double(), -1).numpy()
    draws = 50_000
    uniform = uniforms(
        np.full(draws, 42, np.uint64), np.zeros(draws, np.int64), np.arange(draws, dtype=np.int64)
    )
    given_rows = parameters(draws, uniform=torch.from_numpy(uniform))
    tokens = draw(logits.expand(draws, -1).clone(), given_rows)
    counts = np.bincount(tokens.numpy(), minlength=40)
    chi = ((counts - draws * expected) ** 2 / (draws * expected)).sum()
    assert chi < 39 + 5 * np.sqrt(2 * 39)


def test_uniforms_are_uniform_and_independent() -> None:
    seeds = np.repeat(np.arange(50, dtype=np.uint64), 200)
    positions = np.tile(np.arange(200, dtype=np.int64), 50)
    values = [uniforms(seeds, np.full(10_000, choice), positions) for choice in (0, 1)]
    for value in values:
        assert value.min() >= 0
        assert value.max() < 1
        counts = np.histogram(value, 50, (0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 49 + 5 * np.sqrt(98)
        table = value.reshape(50, 200)
        assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.05
        assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.05
    assert abs(np.corrcoef(values[0], values[1])[0, 1]) < 0.05
    assert len(np.unique(np.concatenate(values))) == 20_000


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_row_draws_alone_as_among_others(data: st.DataObject) -> None:
    """Other rows bring wider candidates and other paths; the row's token stays."""
    rows = data.draw(st.integers(2, 6))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    # Coarse logits: many ties.
    logits = (torch.randn(rows, 1500) * data.draw(st.sampled_from([0.5, 4.0]))).mul(4).round() / 4
    values = {
        "temperature": torch.tensor(data.draw(columns(rows, [0.3, 1.0, 2.0]))),
        "top_k": torch.tensor(data.draw(columns(rows, [0, 1, 3, 40, 1200]))),
        "top_p": torch.tensor(data.draw(columns(rows, [0.1, 0.5, 0.95, 1.0]))),
        "min_p": torch.tensor(data.draw(columns(rows, [0.0, 0.1, 0.9]))),
        "uniform": torch.rand(rows, dtype=torch.float64),
    }
    together = draw(logits.clone(), parameters(rows, **values))
    for row in range(rows):
        own = {name: value[row : row + 1] for name, value in values.items()}
        assert draw(logits[row : row + 1].clone(), parameters(1, **own)) == together[row]


def columns(rows: int, values: list) -> st.SearchStrategy:
    return st.lists(st.sampled_from(values), min_size=rows, max_size=rows)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ends_of_the_interval(case: dict, uniform: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 2000) * 3
    logits[0, [0, -1]] = float("-inf")
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **case}
    expected = np.flatnonzero(kept_by_definition(logits[0].numpy(), **values))
    token = int(draw(logits.clone(), parameters(1, uniform=uniform, **case)))
    assert token == expected[0 if uniform == 0 else -1]


@pytest.mark.parametrize("temperature", [1e-5, 100.0])
def test_extreme_logits(temperature: float) -> None:
    logits = torch.full((2, 100), float("-inf"))
    logits[0, 5] = 0.0
    logits[1] = torch.linspace(-1e4, 1e4, 100)
    tokens = draw(logits, parameters(2, temperature=temperature, top_p=0.9, top_k=50))
    assert tokens[0] == 5
    assert tokens[1] > 95 or temperature > 1


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_broken_row_does_not_hurt_the_others(case: dict, bad: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 1500)
    alone = draw(logits[[0, 2]], parameters(2, **case))
    logits[1] = bad
    tokens = draw(logits, parameters(3, **case))
    assert tokens[[0, 2]].tolist() == alone.tolist()
    assert 0 <= tokens[1] < 1500


def test_equal_logits_stay_together() -> None:
    logits = torch.zeros(10)
    logits[:2] = 1
    got = distribution(logits, 4000, top_k=3)
    assert (got > 0).all(), "the third place is shared by eight tokens"


def test_candidates_and_whole_vocabulary_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(200, 3000) * 3
    given_rows = {"top_p": 0.9, "uniform": torch.rand(200, dtype=torch.float64)}
    narrow = draw(logits.clone(), parameters(200, **given_rows))
    monkeypatch.setattr(sampling, "CANDIDATES", 3000)
    assert torch.equal(draw(logits.clone(), parameters(200, **given_rows)), narrow)


def test_penalties() -> None:
    rng = np.random.default_rng(0)
    rows, vocabulary, width = 4, 30, 25
    logits = rng.normal(size=(rows, vocabulary)).astype(np.float32) * 3
    tokens = rng.integers(0, vocabulary, (rows, width))
    prompt, lengths = np.array([0, 5, 10, 25]), np.array([0, 5, 22, 25])
    repetition, frequency = np.array([1.0, 1.3, 0.7, 2.0]), np.array([0.5, 0.0, 1.5, -2.0])
    presence = np.array([0.0, 1.0, -0.5, 2.0])
    expected = logits.astype(np.float64)
    for row in range(rows):
        seen = tokens[row, : lengths[row]]
        output = tokens[row, prompt[row] : lengths[row]]
        for token in range(vocabulary):
            if token in seen:
                factor = repetition[row] if expected[row, token] <= 0 else 1 / repetition[row]
                expected[row, token] *= factor
            count = int((output == token).sum())
            expected[row, token] -= frequency[row] * count + presence[row] * (count > 0)
    got = penalise(
        torch.from_numpy(logits),
        torch.from_numpy(tokens).int(),
        torch.from_numpy(prompt),
        torch.from_numpy(lengths),
        *(torch.from_numpy(column).float() for column in (repetition, frequency, presence)),
    )
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_repetition_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 40) * 4, torch.randint(0, 40, (3, 20))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(tokens, logits.clone())
    full, none = torch.full((3,), 20), torch.zeros(3)
    got = penalise(logits, tokens.int(), full - 5, full, torch.full((3,), 1.7), none, none)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("processor", "arguments", "case"),
    [
        ("TopKLogitsWarper", {"top_k": 9}, {"top_k": 9}),
        ("TopPLogitsWarper", {"top_p": 0.7}, {"top_p": 0.7}),
        ("MinPLogitsWarper", {"min_p": 0.15}, {"min_p": 0.15}),
        ("TemperatureLogitsWarper", {"temperature": 0.6}, {"temperature": 0.6}),
    ],
)
def test_filters_are_those_of_transformers(processor: str, arguments: dict, case: dict) -> None:
    import transformers

    torch.manual_seed(0)
    logits = torch.randn(200) * 3
    warper = getattr(transformers, processor)(**arguments)
    expected = torch.softmax(warper(torch.zeros(1, 1).long(), logits[None].clone())[0], -1).numpy()
    got = distribution(logits, 4000, **case)
    assert np.abs(got - expected).max() <= 2.5 / 4000


def test_log_probabilities() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 300) * 5
    tokens = torch.tensor([0, 7, int(logits[2].argmax()), 299, 50])
    expected = torch.log_softmax(logits.double(), -1)
    got = log_probabilities(logits, tokens, 4)
    for row, token in enumerate(tokens.tolist()):
        order = expected[row].argsort(descending=True)
        assert got.logprobs[row] == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert got.ranks[row] == order.tolist().index(token) + 1
        assert got.top_ids[row] == order[:4].tolist()
        assert got.top_logprobs[row] == pytest.approx(expected[row][order[:4]].tolist(), abs=1e-5)
    assert log_probabilities(logits, tokens, 0).top_ids == [[]] * 5


class Living(TorchDispatchMode):
    """The most bytes at once of memory that tensors made inside hold, views of it included."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            storage = found.untyped_storage()
            key = storage.data_ptr(), storage.nbytes()
            self._held[key] += 1
            weakref.finalize(found, self._held.subtract, [key])
        self.peak = max(self.peak, sum(size for (_, size), count in self._held.items() if count))
        return found


def test_penalties_take_what_a_plan_counts() -> None:
    rows, vocabulary, tokens = 4, 50_000, torch.zeros(4, 8, dtype=torch.int32)
    each = torch.full((rows,), 1.5)
    with Living() as living:
        penalise(
            torch.randn(rows, vocabulary),
            tokens,
            torch.full((rows,), 3),
            torch.full((rows,), 8),
            each,
            each,
            each,
        )
    copies = living.peak / (4 * rows * vocabulary)
    # One of them the logits that were given.
    assert SAMPLING_COPIES - 1 < copies - 1 <= SAMPLING_COPIES
    assert memory_parts.SAMPLING_COPIES == 1 + SAMPLING_COPIES

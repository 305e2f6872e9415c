"""The library's draw: the same distributions as by definition, at every level, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sampling_operators import CASES, kept_by_definition, parameters

from headrace.kernels.cpu import drawing as module
from headrace.kernels.cpu.drawing import drawing
from headrace.kernels.cpu.library import LEVELS, Team, level
from headrace.kernels.draws import Drawing, DrawParameters
from headrace.kernels.sampling import REFERENCE

DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module", params=[name for name in LEVELS if level(name)])
def drawer(request: pytest.FixtureRequest) -> Drawing:
    return drawing(Team(2, request.param))


def refuse(*arguments: object) -> np.ndarray:
    raise AssertionError("the library had no room")


def drawn(drawer: Drawing, logits: torch.Tensor, asked: DrawParameters) -> np.ndarray:
    columns = {name: getattr(asked, name).numpy() for name in DrawParameters.__slots__}
    tokens = drawer.draw(logits.numpy(), DrawParameters(**columns))
    assert isinstance(tokens, np.ndarray)
    assert tokens.dtype == np.int64
    return tokens


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("vocabulary", [50, 3007])
@pytest.mark.parametrize("spread", [0.3, 4.0], ids=["flat", "peaked"])
def test_distribution(
    drawer: Drawing, case: dict, vocabulary: int, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.host_sampling, "draw", refuse)
    torch.manual_seed(0)
    logits = torch.randn(vocabulary) * spread
    expected = kept_by_definition(logits.numpy(), **{**DEFAULTS, **case})
    draws = 800
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = drawn(
        drawer, logits.expand(draws, -1).contiguous(), parameters(draws, uniform=grid, **case)
    )
    got = np.bincount(tokens, minlength=vocabulary) / draws
    assert np.abs(got - expected).max() <= 2.5 / draws
    assert not got[expected == 0].any()


def test_a_large_vocabulary_agrees_with_the_reference(drawer: Drawing) -> None:
    torch.manual_seed(1)
    rows = 10
    logits = torch.randn(rows, 151_936) * torch.linspace(0.5, 6, rows).unsqueeze(1)
    for case in CASES:
        asked = parameters(rows, uniform=torch.rand(rows, dtype=torch.float64), **case)
        ours, reference = drawn(drawer, logits, asked), REFERENCE.draw(logits, asked).numpy()
        # Sums of another order end a nucleus, or an interval, a hair earlier or later.
        assert (ours != reference).sum() <= 1, case


def test_a_row_draws_alone_as_among_others(drawer: Drawing) -> None:
    torch.manual_seed(2)
    rows = 24
    # Coarse logits: many ties.
    logits = (torch.randn(rows, 2000) * 4).round() / 4
    pick = np.random.default_rng(3)
    values = {
        "temperature": torch.tensor(pick.choice([0.3, 1.0, 2.0], rows)),
        "top_k": torch.tensor(pick.choice([0, 1, 3, 40, 1200], rows)),
        "top_p": torch.tensor(pick.choice([0.1, 0.5, 0.95, 1.0], rows)),
        "min_p": torch.tensor(pick.choice([0.0, 0.1, 0.9], rows)),
        "uniform": torch.rand(rows, dtype=torch.float64),
    }
    together = drawn(drawer, logits, parameters(rows, **values))
    for row in range(rows):
        own = {name: value[row : row + 1] for name, value in values.items()}
        assert drawn(drawer, logits[row : row + 1], parameters(1, **own)) == together[row]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ends_of_the_interval(drawer: Drawing, case: dict, uniform: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 2000) * 3
    logits[0, [0, -1]] = float("-inf")
    expected = np.flatnonzero(kept_by_definition(logits[0].numpy(), **{**DEFAULTS, **case}))
    token = drawn(drawer, logits, parameters(1, uniform=uniform, **case)).item()
    assert token == expected[0 if uniform == 0 else -1]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers_that_are_none(drawer: Drawing, case: dict, bad: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 500)
    logits[1] = bad
    asked = parameters(3, uniform=0.3, **case)
    tokens = drawn(drawer, logits.clone(), asked)
    assert (
        tokens[[0, 2]].tolist()
        == REFERENCE.draw(logits[[0, 2]], parameters(2, uniform=0.3, **case)).tolist()
    )
    assert 0 <= int(tokens[1]) < 500


def test_the_sign_of_a_nan_does_not_matter(drawer: Drawing) -> None:
    """x86 makes NaNs with the sign set, Arm without: neither may pass for a small number."""
    torch.manual_seed(0)
    rows = torch.randn(2, 500)
    rows[1] = rows[0]
    rows[:, 7] = torch.tensor([float("nan"), -float("nan")])
    assert torch.signbit(rows[:, 7]).tolist() == [False, True]
    positive, negative = drawn(drawer, rows, parameters(2, uniform=0.3)).tolist()
    assert positive == negative


def test_flat_rows_without_room_are_drawn_all_the_same(drawer: Drawing) -> None:
    logits = torch.zeros(2, 60_000)
    logits[1, 7] = 30.0
    asked = parameters(2, uniform=0.5, top_p=0.9)
    assert drawn(drawer, logits.clone(), asked).tolist() == REFERENCE.draw(logits, asked).tolist()
